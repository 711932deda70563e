// Registration of the products of FP8 matrices.
#include "fp8/gemm_ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "common/empty_on.h"
#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "common/run_on.h"
#include "fp8/arguments.h"
#include "fp8/gemm.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kGemm = "fp8_gemm";
constexpr const char* kGemmOut = "fp8_gemm_out";

// Whether a GPU multiplies FP8 matrices; elsewhere it is done in fp32.
bool multiplies_fp8([[maybe_unused]] at::Device device) {
#ifdef TE_GRAPH_CUDA
    return device.is_cuda() && has_fp8_gemm(device.index());
#else
    return false;
#endif
}

// Elements from one row of tensor [M, K] to the next; where there is no next one, any stride will do.
int64_t row_stride(const at::Tensor& tensor) { return tensor.size(0) <= 1 ? tensor.size(1) : tensor.stride(0); }

// In fp32, of the elements as they are, so that each product is exact; the scales come last, as in cuBLASLt.
void multiply_in_fp32(const Product& product) {
    // Inside a region of torch.autocast the product would be made of, and rounded to, its dtype.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    at::Tensor sum = at::mm(product.a.to(at::kFloat), product.b.to(at::kFloat).t());
    sum.mul_(product.a_scale_inv.mul(product.b_scale_inv));
    if (product.bias) sum.add_(product.bias->to(at::kFloat));
    if (product.accumulate) {
        product.out.add_(sum.to(product.out.scalar_type()));  // cuBLASLt, too, rounds the product first
    } else {
        product.out.copy_(sum);
    }
}

#ifdef TE_GRAPH_CUDA
void check_aligned(const char* op, const char* argument, const void* data) {
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(data) % kGemmAlignment == 0, op, ": expected ", argument,
                      " at a multiple of ", kGemmAlignment, " bytes, got one at an offset of ",
                      reinterpret_cast<uintptr_t>(data) % kGemmAlignment);
}

// The bias is of out's dtype, which has 16 bits.
Gemm gemm_of(const char* op, const Product& product) {
    const auto& [out, a, b, a_scale_inv, b_scale_inv, bias, fast_accum, accumulate] = product;
    const Gemm work{.a = static_cast<const uint8_t*>(a.const_data_ptr()),
                    .b = static_cast<const uint8_t*>(b.const_data_ptr()),
                    .a_scale_inv = a_scale_inv.const_data_ptr<float>(),
                    .b_scale_inv = b_scale_inv.const_data_ptr<float>(),
                    .bias = bias ? bias->const_data_ptr() : nullptr,
                    .out = out.data_ptr(),
                    .shape = {.rows = out.size(0),
                              .columns = out.size(1),
                              .inner = a.size(1),
                              .a_stride = row_stride(a),
                              .b_stride = row_stride(b),
                              .a_format = format_of(op, "a", a.scalar_type()),
                              .b_format = format_of(op, "b", b.scalar_type()),
                              .dtype = wide_dtype_of(op, "out", out.scalar_type()),
                              .has_bias = bias.has_value(),
                              .fast_accum = fast_accum,
                              .accumulate = accumulate}};
    check_aligned(op, "a", work.a);
    check_aligned(op, "b", work.b);
    check_aligned(op, "out", work.out);
    check_aligned(op, "a_scale_inv", work.a_scale_inv);
    check_aligned(op, "b_scale_inv", work.b_scale_inv);
    if (bias) check_aligned(op, "bias", work.bias);
    return work;
}
#endif

// What both forms take; returns the size of the result. a: [M, K], b: [N, K].
std::array<int64_t, 2> check_operands(const char* op, const at::Tensor& a, const at::Tensor& b,
                                      const at::Tensor& a_scale_inv,  // [] or [1]
                                      const at::Tensor& b_scale_inv,  // [] or [1]
                                      const MaybeTensor& bias,        // [N]
                                      at::ScalarType dtype) {
    for (const auto& [name, tensor] : {std::pair{"a", a}, std::pair{"b", b}}) {
        check_strided(op, name, tensor);
        format_of(op, name, tensor.scalar_type());
        TORCH_CHECK_VALUE(tensor.dim() == 2, op, ": expected ", name, " of two dimensions, got shape ", tensor.sizes());
        check_device(op, name, tensor, a.device());
        const bool is_dense = tensor.size(1) <= 1 || tensor.stride(1) == 1;
        TORCH_CHECK_VALUE(is_dense && row_stride(tensor) >= tensor.size(1), op, ": expected ", name,
                          " with contiguous rows that do not overlap, got shape ", tensor.sizes(), " with strides ",
                          tensor.strides());
    }
    TORCH_CHECK_VALUE(a.size(1) == b.size(1), op, ": expected a and b with rows of one length, got ", a.sizes(),
                      " and ", b.sizes());
    TORCH_CHECK_TYPE(a.scalar_type() != at::kFloat8_e5m2 || b.scalar_type() != at::kFloat8_e5m2, op,
                     ": expected a or b of dtype torch.float8_e4m3fn, got two of torch.float8_e5m2");
    scalar_of(op, "a_scale_inv", a_scale_inv, a.device());
    scalar_of(op, "b_scale_inv", b_scale_inv, a.device());
    wide_dtype_of(op, "dtype", dtype);
    if (bias) {
        wide_dtype_of(op, "bias", bias->scalar_type());
        check_buffer(op, "bias", *bias, {b.size(0)}, a.device());
    }
    if (multiplies_fp8(a.device())) {
        const int64_t row = b.size(0) * static_cast<int64_t>(c10::elementSize(dtype));
        TORCH_CHECK_VALUE(row % kGemmAlignment == 0, op, ": expected a result with rows of a multiple of ",
                          kGemmAlignment, " bytes, got ", b.size(0), " columns of ", dtype_name(dtype));
        for (const auto& [name, tensor] : {std::pair{"a", a}, std::pair{"b", b}}) {
            const bool is_aligned = tensor.size(1) % kGemmAlignment == 0 && row_stride(tensor) % kGemmAlignment == 0;
            TORCH_CHECK_VALUE(is_aligned || tensor.numel() == 0, op, ": expected ", name,
                              " with rows and strides of multiples of ", kGemmAlignment, ", got shape ", tensor.sizes(),
                              " with strides ", tensor.strides());
        }
    }
    return {a.size(0), b.size(0)};
}

at::Tensor gemm(const at::Tensor& a,            // [M, K]
                const at::Tensor& b,            // [N, K]
                const at::Tensor& a_scale_inv,  // [] or [1]
                const at::Tensor& b_scale_inv,  // [] or [1]
                at::ScalarType dtype,
                const MaybeTensor& bias,  // [N]
                bool fast_accum) {
    const auto sizes = check_operands(kGemm, a, b, a_scale_inv, b_scale_inv, bias, dtype);
    const at::Tensor out = empty_on(a.device(), sizes, dtype);
    multiply(kGemm, {out, a, b, a_scale_inv, b_scale_inv, bias, fast_accum});
    return out;
}

void gemm_out(const at::Tensor& out,          // [M, N]
              const at::Tensor& a,            // [M, K]
              const at::Tensor& b,            // [N, K]
              const at::Tensor& a_scale_inv,  // [] or [1]
              const at::Tensor& b_scale_inv,  // [] or [1]
              const MaybeTensor& bias,        // [N]
              bool fast_accum, bool accumulate) {
    wide_dtype_of(kGemmOut, "out", out.scalar_type());
    const auto sizes = check_operands(kGemmOut, a, b, a_scale_inv, b_scale_inv, bias, out.scalar_type());
    check_buffer(kGemmOut, "out", out, sizes, a.device());
    check_apart(kGemmOut, {{"out", out, true},
                           {"a", a, false},
                           {"b", b, false},
                           {"a_scale_inv", a_scale_inv, false},
                           {"b_scale_inv", b_scale_inv, false},
                           {"bias", bias, false}});
    multiply(kGemmOut, {out, a, b, a_scale_inv, b_scale_inv, bias, fast_accum, accumulate});
    note_writes({out});
}

// a [M, K]; b [N, K]; a_scale_inv, b_scale_inv [] or [1]; bias [N] -> [M, N].
at::Tensor gemm_meta(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                     const at::Tensor& b_scale_inv, at::ScalarType dtype, const MaybeTensor& bias, bool) {
    check_devices(kGemm, a.device(),
                  {{"b", b}, {"a_scale_inv", a_scale_inv}, {"b_scale_inv", b_scale_inv}, {"bias", bias}});
    return at::empty_symint({a.sym_size(0), b.sym_size(0)}, a.options().dtype(dtype));
}
// out [M, N]; a [M, K]; b [N, K]; a_scale_inv, b_scale_inv [] or [1]; bias [N].
void gemm_out_meta(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                   const at::Tensor& b_scale_inv, const MaybeTensor& bias, bool, bool) {
    check_devices(kGemmOut, a.device(),
                  {{"out", out}, {"b", b}, {"a_scale_inv", a_scale_inv}, {"b_scale_inv", b_scale_inv}, {"bias", bias}});
}

}  // namespace

void multiply([[maybe_unused]] const char* op, const Product& product) {
    const auto& [out, a, b, a_scale_inv, b_scale_inv, bias, fast_accum, accumulate] = product;
    if (out.numel() == 0) return;
    const MaybeTensor rounded = bias ? MaybeTensor(bias->to(out.scalar_type())) : std::nullopt;
    if (a.size(1) == 0 || !multiplies_fp8(out.device())) {
        return multiply_in_fp32({out, a, b, a_scale_inv, b_scale_inv, rounded, fast_accum, accumulate});
    }
#ifdef TE_GRAPH_CUDA
    // cuBLASLt adds no bias of fp32.
    const bool is_wide = out.scalar_type() == at::kFloat;
    const MaybeTensor inside = is_wide ? std::nullopt : rounded;
    const c10::cuda::CUDAGuard guard(out.device());
    const Gemm work = gemm_of(op, {out, a, b, a_scale_inv, b_scale_inv, inside, fast_accum, accumulate});
    const auto plan = gemm_plan(work.shape);
    // From torch's allocator, which lets no two streams and no two graphs that may run at once have the same.
    const auto bytes = static_cast<int64_t>(workspace_of(*plan));
    const at::Tensor workspace = bytes ? empty_on(out.device(), {bytes}, at::kByte) : at::Tensor();
    launch_gemm(work, *plan, bytes ? workspace.data_ptr() : nullptr, c10::cuda::getCurrentCUDAStream());
    if (rounded && is_wide) out.add_(*rounded);
#endif
}

#ifndef TE_GRAPH_CUDA
std::vector<GemmPlanInfo> gemm_plans() { return {}; }
#endif

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kGemm, gemm);
    m.impl(kGemmOut, gemm_out);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kGemm, gemm_meta);
    m.impl(kGemmOut, gemm_out_meta);
}

// No formulas: what comes from a cast has no gradient that one could mean.
TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kGemm, kGemmOut}) m.impl(name, no_derivative());
}

}  // namespace te_graph::fp8
