// Registration of the casts.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "common/run_on.h"
#include "fp8/arguments.h"
#include "fp8/operand.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kCast = "fp8_cast";
constexpr const char* kCastOut = "fp8_cast_out";
constexpr const char* kTranspose = "fp8_cast_transpose";
constexpr const char* kDbias = "fp8_cast_transpose_dbias";
constexpr const char* kTransposeOut = "fp8_cast_transpose_out";
constexpr const char* kDequantize = "fp8_dequantize";
constexpr const char* kDequantizeOut = "fp8_dequantize_out";

// tensor: [M, N].
void check_matrix(const char* op, const char* argument, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.dim() == 2, op, ": expected ", argument, " of two dimensions, got shape ", tensor.sizes());
}

// x: [...].
void check_input(const char* op, const at::Tensor& x) {
    check_strided(op, "x", x);
    wide_dtype_of(op, "x", x.scalar_type());
}

// All of a cast but where it goes; `x` is contiguous.
Cast cast_of(const char* op, const at::Tensor& x,  // [...]
             const at::Tensor& scale,              // [] or [1]
             const MaybeTensor& scale_inv,         // [] or [1]
             const MaybeTensor& amax,              // [] or [1]
             const MaybeTensor& counts)            // [kCounts]
{
    check_input(op, x);
    return {.input = x.const_data_ptr(),
            .out = nullptr,
            .out_t = nullptr,
            .scale = scalar_of(op, "scale", scale, x.device()),
            .scale_inv = scalar_of(op, "scale_inv", scale_inv, x.device()),
            .amax = scalar_of(op, "amax", amax, x.device()),
            .counts = counts_of(op, counts, x.device()),
            .rows = x.dim() == 2 ? x.size(0) : 1,
            .columns = x.dim() == 2 ? x.size(1) : x.numel(),
            .dtype = wide_dtype_of(op, "x", x.scalar_type()),
            .format = {},
            .pads_out_t = false,
            .reserved = {}};
}

// An output that the caller gave, out [shape]: contiguous. x: [...].
void set_out(const char* op, const char* argument, const at::Tensor& out, at::IntArrayRef shape, const at::Tensor& x,
             uint8_t*& data) {
    check_buffer(op, argument, out, shape, x.device());
    data = static_cast<uint8_t*>(out.data_ptr());
}

// x [...] -> [1].
at::Tensor new_scale_inv(const at::Tensor& x) { return at::empty({1}, x.options().dtype(at::kFloat)); }

std::tuple<at::Tensor, at::Tensor> cast(const at::Tensor& x,      // [...]
                                        const at::Tensor& scale,  // [] or [1]
                                        at::ScalarType dtype,
                                        const MaybeTensor& amax,    // [] or [1]
                                        const MaybeTensor& counts)  // [kCounts]
{
    check_input(kCast, x);
    const at::Tensor input = x.contiguous(), scale_inv = new_scale_inv(x);
    Cast work = cast_of(kCast, input, scale, scale_inv, amax, counts);
    check_apart(kCast, {{"x", input, false}, {"scale", scale, false}, {"amax", amax, true}, {"counts", counts, true}});
    work.format = format_of(kCast, "dtype", dtype);
    const at::Tensor out = at::empty(x.sizes(), x.options().dtype(dtype));
    work.out = static_cast<uint8_t*>(out.data_ptr());
    TE_GRAPH_RUN(x.device(), cast, work, {});
    note_writes({amax, counts});
    return {out, scale_inv};
}

void cast_out(const at::Tensor& out,         // [...]
              const at::Tensor& x,           // [...]
              const at::Tensor& scale,       // [] or [1]
              const MaybeTensor& scale_inv,  // [] or [1]
              const MaybeTensor& amax,       // [] or [1]
              const MaybeTensor& counts,     // [kCounts]
              const MaybeTensor& noop)       // [] or [1]
{
    check_input(kCastOut, x);
    const at::Tensor input = x.contiguous();
    Cast work = cast_of(kCastOut, input, scale, scale_inv, amax, counts);
    work.format = format_of(kCastOut, "out", out.scalar_type());
    set_out(kCastOut, "out", out, x.sizes(), x, work.out);
    const Flag flag = flag_of(kCastOut, "noop", noop, x.device());
    check_apart(kCastOut, {{"out", out, true},
                           {"x", input, false},
                           {"scale", scale, false},
                           {"scale_inv", scale_inv, true},
                           {"amax", amax, true},
                           {"counts", counts, true},
                           {"noop", noop, false}});
    TE_GRAPH_RUN(x.device(), cast, work, flag);
    note_writes({out, scale_inv, amax, counts});
}

// A cast with a transposed copy into new tensors. Everything is checked and nothing written.
struct PreparedTranspose {
    at::Tensor input, out, out_t, scale_inv;
    Cast cast;
};
PreparedTranspose prepare_transpose(const char* op,
                                    const at::Tensor& x,      // [M, N]
                                    const at::Tensor& scale,  // [] or [1]
                                    at::ScalarType dtype,
                                    const MaybeTensor& amax,    // [] or [1]
                                    const MaybeTensor& counts)  // [kCounts]
{
    check_matrix(op, "x", x);
    check_input(op, x);
    const at::Tensor input = x.contiguous(), scale_inv = new_scale_inv(x);
    Cast work = cast_of(op, input, scale, scale_inv, amax, counts);
    check_apart(op, {{"x", input, false}, {"scale", scale, false}, {"amax", amax, true}, {"counts", counts, true}});
    work.format = format_of(op, "dtype", dtype);
    const at::Tensor out = at::empty(x.sizes(), x.options().dtype(dtype));
    const at::Tensor out_t = at::empty({x.size(1), x.size(0)}, out.options());
    work.out = static_cast<uint8_t*>(out.data_ptr());
    work.out_t = static_cast<uint8_t*>(out_t.data_ptr());
    return {input, out, out_t, scale_inv, work};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> cast_transpose(const at::Tensor& x,      // [M, N]
                                                              const at::Tensor& scale,  // [] or [1]
                                                              at::ScalarType dtype,
                                                              const MaybeTensor& amax,    // [] or [1]
                                                              const MaybeTensor& counts)  // [kCounts]
{
    const PreparedTranspose made = prepare_transpose(kTranspose, x, scale, dtype, amax, counts);
    TE_GRAPH_RUN(x.device(), cast_transpose, made.cast, {}, {});
    note_writes({amax, counts});
    return {made.out, made.out_t, made.scale_inv};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cast_transpose_dbias(const at::Tensor& x,      // [M, N]
                                                                                const at::Tensor& scale,  // [] or [1]
                                                                                at::ScalarType dtype,
                                                                                const MaybeTensor& amax,    // [] or [1]
                                                                                const MaybeTensor& counts)  // [kCounts]
{
    const PreparedTranspose made = prepare_transpose(kDbias, x, scale, dtype, amax, counts);
    const at::Tensor dbias = at::empty({x.size(1)}, x.options());
    const Sums column = sums_into(kDbias, dbias, x.size(0));
    TE_GRAPH_RUN(x.device(), cast_transpose, made.cast, column.sums, {});
    note_writes({amax, counts});
    return {made.out, made.out_t, made.scale_inv, dbias};
}

void cast_transpose_out(const at::Tensor& out,         // [M, N]
                        const at::Tensor& out_t,       // [N, M], or [N, padded(M)]
                        const at::Tensor& x,           // [M, N]
                        const at::Tensor& scale,       // [] or [1]
                        const MaybeTensor& scale_inv,  // [] or [1]
                        const MaybeTensor& amax,       // [] or [1]
                        const MaybeTensor& dbias,      // [N]
                        const MaybeTensor& counts,     // [kCounts]
                        const MaybeTensor& noop)       // [] or [1]
{
    constexpr const char* kOp = kTransposeOut;
    check_matrix(kOp, "x", x);
    check_input(kOp, x);
    const at::Tensor input = x.contiguous();
    Cast work = cast_of(kOp, input, scale, scale_inv, amax, counts);
    work.format = format_of(kOp, "out", out.scalar_type());
    check_dtype(kOp, "out_t", out_t, out.scalar_type());
    set_out(kOp, "out", out, x.sizes(), x, work.out);
    work.pads_out_t = out_t.dim() == 2 && out_t.size(1) != x.size(0);
    set_out(kOp, "out_t", out_t, {x.size(1), out_t_stride(work)}, x, work.out_t);
    if (dbias) {
        TORCH_CHECK_TYPE(dbias->scalar_type() == at::kFloat || dbias->scalar_type() == x.scalar_type(), kOp,
                         ": expected dbias of dtype torch.float32 or ", dtype_name(x.scalar_type()), ", got ",
                         dtype_name(dbias->scalar_type()));
        check_buffer(kOp, "dbias", *dbias, {x.size(1)}, x.device());
    }
    const Flag flag = flag_of(kOp, "noop", noop, x.device());
    check_apart(kOp, {{"out", out, true},
                      {"out_t", out_t, true},
                      {"x", input, false},
                      {"scale", scale, false},
                      {"scale_inv", scale_inv, true},
                      {"amax", amax, true},
                      {"dbias", dbias, true},
                      {"counts", counts, true},
                      {"noop", noop, false}});
    const Sums column = sums_into(kOp, dbias.value_or(at::Tensor()), x.size(0));
    TE_GRAPH_RUN(x.device(), cast_transpose, work, column.sums, flag);
    note_writes({out, out_t, scale_inv, amax, dbias, counts});
}

Dequantization dequantization_of(const char* op, const at::Tensor& x,  // [...]
                                 const at::Tensor& scale_inv,          // [] or [1]
                                 const at::Tensor& out)                // [...]
{
    return {.input = static_cast<const uint8_t*>(x.const_data_ptr()),
            .out = out.data_ptr(),
            .scale_inv = scalar_of(op, "scale_inv", scale_inv, x.device()),
            .numel = x.numel(),
            .format = format_of(op, "x", x.scalar_type()),
            .dtype = wide_dtype_of(op, "out", out.scalar_type())};
}

at::Tensor dequantize(const at::Tensor& x,          // [...]
                      const at::Tensor& scale_inv,  // [] or [1]
                      at::ScalarType dtype) {
    check_strided(kDequantize, "x", x);
    format_of(kDequantize, "x", x.scalar_type());
    wide_dtype_of(kDequantize, "dtype", dtype);
    const at::Tensor input = x.contiguous();
    const at::Tensor out = at::empty(x.sizes(), x.options().dtype(dtype));
    const Dequantization work = dequantization_of(kDequantize, input, scale_inv, out);
    TE_GRAPH_RUN(x.device(), dequantize, work);
    return out;
}

void dequantize_out(const at::Tensor& out,        // [...]
                    const at::Tensor& x,          // [...]
                    const at::Tensor& scale_inv)  // [] or [1]
{
    check_strided(kDequantizeOut, "x", x);
    format_of(kDequantizeOut, "x", x.scalar_type());
    check_buffer(kDequantizeOut, "out", out, x.sizes(), x.device());
    const at::Tensor input = x.contiguous();
    const Dequantization work = dequantization_of(kDequantizeOut, input, scale_inv, out);
    check_apart(kDequantizeOut, {{"out", out, true}, {"x", input, false}, {"scale_inv", scale_inv, false}});
    TE_GRAPH_RUN(x.device(), dequantize, work);
    note_writes({out});
}

// Shapes and dtypes alone, for torch.compile and fake tensors.

// x [...]; scale, amax [] or [1]; counts [kCounts].
void check_cast_meta(const char* op, const at::Tensor& x, const at::Tensor& scale, const MaybeTensor& amax,
                     const MaybeTensor& counts) {
    check_devices(op, x.device(), {{"scale", scale}, {"amax", amax}, {"counts", counts}});
}
// x [...]; scale, amax [] or [1]; counts [kCounts] -> [...], [1].
std::tuple<at::Tensor, at::Tensor> cast_meta(const at::Tensor& x, const at::Tensor& scale, at::ScalarType dtype,
                                             const MaybeTensor& amax, const MaybeTensor& counts) {
    check_cast_meta(kCast, x, scale, amax, counts);
    return {at::empty_symint(x.sym_sizes(), x.options().dtype(dtype)), new_scale_inv(x)};
}
// x [M, N]; scale, amax [] or [1]; counts [kCounts] -> [M, N], [N, M], [1].
std::tuple<at::Tensor, at::Tensor, at::Tensor> cast_transpose_meta(const at::Tensor& x, const at::Tensor& scale,
                                                                   at::ScalarType dtype, const MaybeTensor& amax,
                                                                   const MaybeTensor& counts) {
    check_cast_meta(kTranspose, x, scale, amax, counts);
    check_matrix(kTranspose, "x", x);
    return {at::empty_symint(x.sym_sizes(), x.options().dtype(dtype)),
            at::empty_symint({x.sym_size(1), x.sym_size(0)}, x.options().dtype(dtype)), new_scale_inv(x)};
}
// x [M, N]; scale, amax [] or [1]; counts [kCounts] -> [M, N], [N, M], [1], [N].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cast_transpose_dbias_meta(const at::Tensor& x,
                                                                                     const at::Tensor& scale,
                                                                                     at::ScalarType dtype,
                                                                                     const MaybeTensor& amax,
                                                                                     const MaybeTensor& counts) {
    check_cast_meta(kDbias, x, scale, amax, counts);
    const auto [out, out_t, scale_inv] = cast_transpose_meta(x, scale, dtype, amax, counts);
    return {out, out_t, scale_inv, at::empty_symint({x.sym_size(1)}, x.options())};
}
// out, x [...]; scale, scale_inv, amax, noop [] or [1]; counts [kCounts].
void cast_out_meta(const at::Tensor& out, const at::Tensor& x, const at::Tensor& scale, const MaybeTensor& scale_inv,
                   const MaybeTensor& amax, const MaybeTensor& counts, const MaybeTensor& noop) {
    check_cast_meta(kCastOut, x, scale, amax, counts);
    check_devices(kCastOut, x.device(), {{"out", out}, {"scale_inv", scale_inv}, {"noop", noop}});
}
// out, x [M, N]; out_t [N, M] or [N, padded(M)]; scale, scale_inv, amax, noop [] or [1]; dbias [N]; counts [kCounts].
void cast_transpose_out_meta(const at::Tensor& out, const at::Tensor& out_t, const at::Tensor& x,
                             const at::Tensor& scale, const MaybeTensor& scale_inv, const MaybeTensor& amax,
                             const MaybeTensor& dbias, const MaybeTensor& counts, const MaybeTensor& noop) {
    check_cast_meta(kTransposeOut, x, scale, amax, counts);
    check_devices(kTransposeOut, x.device(),
                  {{"out", out}, {"out_t", out_t}, {"scale_inv", scale_inv}, {"dbias", dbias}, {"noop", noop}});
}
// x [...]; scale_inv [] or [1] -> [...].
at::Tensor dequantize_meta(const at::Tensor& x, const at::Tensor& scale_inv, at::ScalarType dtype) {
    check_devices(kDequantize, x.device(), {{"scale_inv", scale_inv}});
    return at::empty_symint(x.sym_sizes(), x.options().dtype(dtype));
}
// out, x [...]; scale_inv [] or [1].
void dequantize_out_meta(const at::Tensor& out, const at::Tensor& x, const at::Tensor& scale_inv) {
    check_devices(kDequantizeOut, x.device(), {{"out", out}, {"scale_inv", scale_inv}});
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kCast, cast);
    m.impl(kCastOut, cast_out);
    m.impl(kTranspose, cast_transpose);
    m.impl(kDbias, cast_transpose_dbias);
    m.impl(kTransposeOut, cast_transpose_out);
    m.impl(kDequantize, dequantize);
    m.impl(kDequantizeOut, dequantize_out);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kCast, cast_meta);
    m.impl(kTranspose, cast_transpose_meta);
    m.impl(kDbias, cast_transpose_dbias_meta);
    m.impl(kDequantize, dequantize_meta);
    m.impl(kCastOut, cast_out_meta);
    m.impl(kTransposeOut, cast_transpose_out_meta);
    m.impl(kDequantizeOut, dequantize_out_meta);
}

// No formulas: a cast has no gradient that one could mean.
TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kCast, kCastOut, kTranspose, kDbias, kTransposeOut, kDequantize, kDequantizeOut}) {
        m.impl(name, no_derivative());
    }
}

}  // namespace te_graph::fp8
