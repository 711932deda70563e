// Registration of the two directions of a linear layer in FP8.
//
//   forward   x8, x8ᵀ = cast(x);       y = x8 · w8ᵀ + bias
//   backward  g8, g8ᵀ = cast(grad);    grad_x = g8 · w8,  grad_weight = g8ᵀ · x8,  grad_bias = column sums of grad
//             grad_weight = x8ᵀ · g8, of weights that are [I, O]
//
// Any number of tokens: rows of the transposed copies end in zeros up to a multiple of 16, which add nothing.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

#include "common/empty_on.h"
#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "fp8/arguments.h"
#include "fp8/gemm.h"
#include "fp8/gemm_ops.h"
#include "fp8/operand.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kLinearForward = "fp8_linear_forward";
constexpr const char* kLinearBackward = "fp8_linear_backward";

void check_weight(const char* op, const char* argument, const at::Tensor& weight,  // [O, I]
                  const at::Tensor& weight_scale_inv,                              // [] or [1]
                  const at::Tensor& x,                                             // [..., inner]
                  int64_t inner) {
    check_contiguous(op, argument, weight);
    format_of(op, argument, weight.scalar_type());
    check_device(op, argument, weight, x.device());
    scalar_of(op, "weight_scale_inv", weight_scale_inv, x.device());
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == inner, op, ": expected ", argument,
                      " of two dimensions with rows of ", inner, ", as the input's last one, got ", weight.sizes());
    TORCH_CHECK_VALUE(weight.size(0) % kGemmAlignment == 0 && inner % kGemmAlignment == 0, op, ": expected ", argument,
                      " of sizes that ", kGemmAlignment, " divides, got ", weight.sizes());
}

// x: [...] with at least one dimension, of a dtype that can be cast.
void check_tokens(const char* op, const char* argument, const at::Tensor& x) {
    check_strided(op, argument, x);
    TORCH_CHECK_VALUE(x.dim() >= 1, op, ": expected ", argument, " of at least one dimension, got a scalar");
    wide_dtype_of(op, argument, x.scalar_type());
}

// Results are y [..., O], the transposed cast of x [I, padded(M)], or [0] without, and its scale_inv [1].
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward(const at::Tensor& x,                 // [..., I]
                                                              const at::Tensor& weight,            // [O, I] FP8
                                                              const at::Tensor& weight_scale_inv,  // [] or [1]
                                                              const MaybeTensor& bias,             // [O]
                                                              const MaybeTensor& scale,            // [] or [1]
                                                              const MaybeTensor& amax,             // [] or [1]
                                                              at::ScalarType dtype, bool with_transposed) {
    check_tokens(kLinearForward, "x", x);
    check_weight(kLinearForward, "weight", weight, weight_scale_inv, x, x.size(-1));
    wide_dtype_of(kLinearForward, "dtype", dtype);
    if (bias) check_buffer(kLinearForward, "bias", *bias, {weight.size(0)}, x.device());
    check_apart(kLinearForward, {{"x", x, false}, {"scale", scale, false}, {"amax", amax, true}});
    const at::Tensor matrix = as_matrix(x);
    const Operand input = cast_operand(kLinearForward, matrix, {scale, amax, weight.scalar_type()}, with_transposed);
    const at::Tensor y = empty_on(x.device(), {matrix.size(0), weight.size(0)}, dtype);
    multiply(kLinearForward, {.out = y,
                              .a = input.data,
                              .b = weight,
                              .a_scale_inv = input.scale_inv,
                              .b_scale_inv = weight_scale_inv,
                              .bias = bias,
                              .fast_accum = true});
    note_writes({amax});
    const at::Tensor transposed = with_transposed ? input.transposed : empty_on(x.device(), {0}, weight.scalar_type());
    return {x.dim() == 2 ? y : y.view(with_last(x.sizes(), weight.size(0))), transposed, input.scale_inv};
}

// Results are the gradients of x [..., I], of the weight, [O, I], or [I, O] if inputs_first, and of the bias [O], those
// that output_mask asks for, but not what goes into grad_weight_out or grad_bias_out.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(const at::Tensor& grad,               // [..., O]
                                                               const MaybeTensor& weight_t,          // [I, O] FP8
                                                               const MaybeTensor& weight_scale_inv,  // [] or [1]
                                                               const MaybeTensor& x_t,               // [I, padded(M)]
                                                               const MaybeTensor& x_scale_inv,       // [] or [1]
                                                               const MaybeTensor& scale,             // [] or [1]
                                                               const MaybeTensor& amax,              // [] or [1]
                                                               at::ScalarType grad_dtype, at::ScalarType x_dtype,
                                                               at::ScalarType weight_dtype,
                                                               std::array<bool, 3> output_mask,
                                                               const MaybeTensor& grad_weight_out,  // [O, I] or [I, O]
                                                               bool accumulate_weight,
                                                               const MaybeTensor& grad_bias_out,  // [O]
                                                               bool accumulate_bias, bool inputs_first) {
    const auto [needs_x, needs_weight, needs_bias] = output_mask;
    check_tokens(kLinearBackward, "grad", grad);
    format_of(kLinearBackward, "grad_dtype", grad_dtype);
    const at::Tensor matrix = as_matrix(grad);
    if (needs_x) {
        TORCH_CHECK_VALUE(weight_t && weight_scale_inv, kLinearBackward,
                          ": expected weight_t and weight_scale_inv for the gradient of the input, got none");
        check_weight(kLinearBackward, "weight_t", *weight_t, *weight_scale_inv, grad, grad.size(-1));
    }
    if (needs_weight) {
        TORCH_CHECK_VALUE(x_t && x_scale_inv, kLinearBackward,
                          ": expected x_t and x_scale_inv for the gradient of the weight, got none");
        check_contiguous(kLinearBackward, "x_t", *x_t);
        format_of(kLinearBackward, "x_t", x_t->scalar_type());
        check_device(kLinearBackward, "x_t", *x_t, grad.device());
        scalar_of(kLinearBackward, "x_scale_inv", *x_scale_inv, grad.device());
        TORCH_CHECK_VALUE(x_t->dim() == 2 && x_t->size(1) == padded(matrix.size(0)), kLinearBackward,
                          ": expected x_t of two dimensions with rows of ", padded(matrix.size(0)),
                          ", the number of tokens rounded up, got ", x_t->sizes());
    }
    std::array<int64_t, 2> weight_sizes{grad.size(-1), needs_weight ? x_t->size(0) : 0};
    if (inputs_first) std::swap(weight_sizes[0], weight_sizes[1]);
    check_grad_out(kLinearBackward, "grad_weight", grad_weight_out, needs_weight, accumulate_weight, weight_dtype,
                   weight_sizes, grad.device());
    check_grad_out(kLinearBackward, "grad_bias", grad_bias_out, needs_bias, accumulate_bias, grad.scalar_type(),
                   {grad.size(-1)}, grad.device());
    check_apart(kLinearBackward, {{"grad", grad, false},
                                  {"scale", scale, false},
                                  {"amax", amax, true},
                                  {"grad_weight", grad_weight_out, true},
                                  {"grad_bias", grad_bias_out, true}});
    at::Tensor grad_x, grad_weight, grad_bias;
    if (needs_bias && !grad_bias_out) grad_bias = empty_on(grad.device(), {grad.size(-1)}, grad.scalar_type());
    const at::Tensor& sums = grad_bias_out ? *grad_bias_out : grad_bias;
    Operand operand;
    if (needs_x || needs_weight || needs_bias) {
        operand = cast_operand(kLinearBackward, matrix, {scale, amax, grad_dtype}, needs_weight, sums, accumulate_bias);
    }
    if (needs_x) {
        const int64_t inputs = weight_t->size(0);
        const at::Tensor out = empty_on(grad.device(), {matrix.size(0), inputs}, x_dtype);
        multiply(kLinearBackward, {.out = out,
                                   .a = operand.data,
                                   .b = *weight_t,
                                   .a_scale_inv = operand.scale_inv,
                                   .b_scale_inv = *weight_scale_inv});
        grad_x = grad.dim() == 2 ? out : out.view(with_last(grad.sizes(), inputs));
    }
    if (needs_weight) {
        if (!grad_weight_out) grad_weight = empty_on(grad.device(), weight_sizes, weight_dtype);
        multiply(kLinearBackward, {.out = grad_weight_out ? *grad_weight_out : grad_weight,
                                   .a = inputs_first ? *x_t : operand.transposed,
                                   .b = inputs_first ? operand.transposed : *x_t,
                                   .a_scale_inv = inputs_first ? *x_scale_inv : operand.scale_inv,
                                   .b_scale_inv = inputs_first ? operand.scale_inv : *x_scale_inv,
                                   .accumulate = accumulate_weight});
    }
    note_writes({amax, grad_weight_out, grad_bias_out});
    return {grad_x, grad_weight, grad_bias};
}

// x [..., I]; weight [O, I]; weight_scale_inv, scale, amax [] or [1]; bias [O] -> as linear_forward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward_meta(const at::Tensor& x, const at::Tensor& weight,
                                                                   const at::Tensor& weight_scale_inv,
                                                                   const MaybeTensor& bias, const MaybeTensor& scale,
                                                                   const MaybeTensor& amax, at::ScalarType dtype,
                                                                   bool with_transposed) {
    check_devices(
        kLinearForward, x.device(),
        {{"weight", weight}, {"weight_scale_inv", weight_scale_inv}, {"bias", bias}, {"scale", scale}, {"amax", amax}});
    const c10::SymInt columns = x.sym_size(-1);
    const c10::SymInt padded_rows = padded(x.sym_numel() / columns);
    const auto options = weight.options();
    return {at::empty_symint(with_last(x.sym_sizes(), weight.sym_size(0)), x.options().dtype(dtype)),
            with_transposed ? at::empty_symint({columns, padded_rows}, options) : at::empty({0}, options),
            at::empty({1}, x.options().dtype(at::kFloat))};
}
// grad [..., O]; weight_t [I, O]; x_t [I, padded(M)]; grad_weight_out [O, I] or [I, O]; grad_bias_out [O];
// weight_scale_inv, x_scale_inv, scale, amax [] or [1] -> as linear_backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward_meta(
    const at::Tensor& grad, const MaybeTensor& weight_t, const MaybeTensor& weight_scale_inv, const MaybeTensor& x_t,
    const MaybeTensor& x_scale_inv, const MaybeTensor& scale, const MaybeTensor& amax, at::ScalarType,
    at::ScalarType x_dtype, at::ScalarType weight_dtype, std::array<bool, 3> output_mask,
    const MaybeTensor& grad_weight_out, bool, const MaybeTensor& grad_bias_out, bool, bool inputs_first) {
    check_devices(kLinearBackward, grad.device(),
                  {{"weight_t", weight_t},
                   {"weight_scale_inv", weight_scale_inv},
                   {"x_t", x_t},
                   {"x_scale_inv", x_scale_inv},
                   {"scale", scale},
                   {"amax", amax},
                   {"grad_weight", grad_weight_out},
                   {"grad_bias", grad_bias_out}});
    at::Tensor grad_x, grad_weight, grad_bias;
    if (output_mask[0]) {
        grad_x = at::empty_symint(with_last(grad.sym_sizes(), weight_t->sym_size(0)), grad.options().dtype(x_dtype));
    }
    if (output_mask[1] && !grad_weight_out) {
        std::array<c10::SymInt, 2> sizes{grad.sym_size(-1), x_t->sym_size(0)};
        if (inputs_first) std::swap(sizes[0], sizes[1]);
        grad_weight = at::empty_symint(sizes, grad.options().dtype(weight_dtype));
    }
    if (output_mask[2] && !grad_bias_out) grad_bias = at::empty_symint({grad.sym_size(-1)}, grad.options());
    return {grad_x, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kLinearForward, linear_forward);
    m.impl(kLinearBackward, linear_backward);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kLinearForward, linear_forward_meta);
    m.impl(kLinearBackward, linear_backward_meta);
}

// The derivative is that of te_graph.Linear (linear_backward.cpp), which knows both directions' scales.
TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kLinearForward, kLinearBackward}) m.impl(name, no_derivative());
}

}  // namespace te_graph::fp8
