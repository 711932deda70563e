// Registration of activations, and their derivatives, that are cast at once.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "common/empty_on.h"
#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "common/run_on.h"
#include "fp8/activation_cast.h"
#include "fp8/arguments.h"
#include "fp8/operand.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kActivationForward = "fp8_activation_cast_transpose";
constexpr const char* kActivationBackward = "fp8_activation_backward_cast_transpose";

Activation activation_of(const char* op, std::string_view name) {
    std::string names;
    for (const Activation activation : kActivations) {
        if (name == name_of(activation)) return activation;
        names += std::string(names.empty() ? "" : ", ") + name_of(activation);
    }
    TORCH_CHECK_VALUE(false, op, ": expected activation to be one of ", names, ", got ", name);
}

// x: [M, N], or gated [M, 2 N].
ActivationArguments arguments_of(const char* op, const at::Tensor& x, std::string_view activation, bool gated,
                                 bool is_backward) {
    check_strided(op, "x", x);
    TORCH_CHECK_VALUE(x.dim() == 2, op, ": expected x of two dimensions, got shape ", x.sizes());
    const int64_t multiple = gated ? 2 * kEight : kEight;
    TORCH_CHECK_VALUE(x.size(1) % multiple == 0, op, ": expected x with columns that ", multiple, " divides, got ",
                      x.sizes());
    return {.x = nullptr,
            .grad = nullptr,
            .rows = x.size(0),
            .columns = gated ? x.size(1) / 2 : x.size(1),
            .dtype = wide_dtype_of(op, "x", x.scalar_type()),
            .activation = activation_of(op, activation),
            .is_gated = gated,
            .is_backward = is_backward};
}

// x: as aligned_for_eights() returns it; column_sums: [columns_made], or undefined.
Operand cast_activation(const char* op, const ActivationArguments& work, const at::Tensor& x, const Scaling& scaling,
                        bool with_transposed, const at::Tensor& column_sums = {}, bool accumulate_sums = false) {
    const at::Device device = x.device();
    const auto find = [&](const CurrentScale& scale) { TE_GRAPH_RUN(device, activation_current_scale, work, scale); };
    const auto cast = [&](const Cast& one, const ColumnSums& sums) {
        TE_GRAPH_RUN(device, activation_cast, work, one, sums);
    };
    const Made made{work.rows, columns_made(work), work.dtype, device, find, cast};
    return cast_made(op, made, scaling, with_transposed, column_sums, accumulate_sums);
}

// Results are casts [M, N] and, or [0] without, [N, padded(M)], and their scale_inv [1].
std::tuple<at::Tensor, at::Tensor, at::Tensor> activation_forward(const at::Tensor& x,  // [M, N], or gated [M, 2 N]
                                                                  std::string_view activation, at::ScalarType dtype,
                                                                  bool gated,
                                                                  const MaybeTensor& scale,  // [] or [1]
                                                                  const MaybeTensor& amax,   // [] or [1]
                                                                  bool with_transposed) {
    ActivationArguments work = arguments_of(kActivationForward, x, activation, gated, false);
    check_apart(kActivationForward, {{"x", x, false}, {"scale", scale, false}, {"amax", amax, true}});
    const at::Tensor input = aligned_for_eights(x);
    work.x = input.const_data_ptr();
    const Operand operand = cast_activation(kActivationForward, work, input, {scale, amax, dtype}, with_transposed);
    note_writes({amax});
    return {operand.data, with_transposed ? operand.transposed : empty_on(x.device(), {0}, dtype), operand.scale_inv};
}

// Results are casts of the gradient of x, as above, and its column sums, or [0]: not asked for, or in column_sums.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> activation_backward_cast(
    const at::Tensor& grad,  // [M, N]
    const at::Tensor& x,     // [M, N], or gated [M, 2 N]
    std::string_view activation, at::ScalarType dtype, bool gated,
    const MaybeTensor& scale,  // [] or [1]
    const MaybeTensor& amax,   // [] or [1]
    bool with_transposed, bool with_sums,
    const MaybeTensor& column_sums,  // of x's columns
    bool accumulate_sums) {
    ActivationArguments work = arguments_of(kActivationBackward, x, activation, gated, true);
    check_strided(kActivationBackward, "grad", grad);
    check_dtype(kActivationBackward, "grad", grad, x.scalar_type());
    check_shape(kActivationBackward, "grad", grad, {work.rows, work.columns});
    check_device(kActivationBackward, "grad", grad, x.device());
    check_grad_out(kActivationBackward, "column_sums", column_sums, with_sums, accumulate_sums, x.scalar_type(),
                   {x.size(1)}, x.device());
    check_apart(kActivationBackward, {{"grad", grad, false},
                                      {"x", x, false},
                                      {"scale", scale, false},
                                      {"amax", amax, true},
                                      {"column_sums", column_sums, true}});
    const at::Tensor input = aligned_for_eights(x), grad_input = aligned_for_eights(grad);
    work.x = input.const_data_ptr();
    work.grad = grad_input.const_data_ptr();
    const bool is_result = with_sums && !column_sums;
    const at::Tensor sums = empty_on(x.device(), {is_result ? x.size(1) : 0}, x.scalar_type());
    const Operand operand = cast_activation(kActivationBackward, work, input, {scale, amax, dtype}, with_transposed,
                                            is_result ? sums : column_sums.value_or(at::Tensor()), accumulate_sums);
    note_writes({amax, column_sums});
    return {operand.data, with_transposed ? operand.transposed : empty_on(x.device(), {0}, dtype), operand.scale_inv,
            sums};
}

// Shapes alone.
// x [M, N], or gated [M, 2 N]; scale, amax [] or [1] -> as forward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> activation_forward_meta(const at::Tensor& x, std::string_view activation,
                                                                       at::ScalarType dtype, bool gated,
                                                                       const MaybeTensor& scale,
                                                                       const MaybeTensor& amax, bool with_transposed) {
    activation_of(kActivationForward, activation);
    check_devices(kActivationForward, x.device(), {{"scale", scale}, {"amax", amax}});
    return casts_meta(x, gated ? x.sym_size(1) / 2 : x.sym_size(1), dtype, with_transposed);
}
// grad [M, N]; x [M, N], or gated [M, 2 N]; scale, amax [] or [1]; column_sums of x's columns -> as backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> activation_backward_meta(
    const at::Tensor& grad, const at::Tensor& x, std::string_view activation, at::ScalarType dtype, bool,
    const MaybeTensor& scale, const MaybeTensor& amax, bool with_transposed, bool with_sums,
    const MaybeTensor& column_sums, bool) {
    activation_of(kActivationBackward, activation);
    check_devices(kActivationBackward, x.device(),
                  {{"grad", grad}, {"scale", scale}, {"amax", amax}, {"column_sums", column_sums}});
    const auto [out, out_t, scale_inv] = casts_meta(x, x.sym_size(1), dtype, with_transposed);
    const c10::SymInt sums = with_sums && !column_sums ? x.sym_size(1) : c10::SymInt(0);
    return {out, out_t, scale_inv, at::empty_symint({sums}, x.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kActivationForward, activation_forward);
    m.impl(kActivationBackward, activation_backward_cast);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kActivationForward, activation_forward_meta);
    m.impl(kActivationBackward, activation_backward_meta);
}

TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kActivationForward, kActivationBackward}) m.impl(name, no_derivative());
}

}  // namespace te_graph::fp8
