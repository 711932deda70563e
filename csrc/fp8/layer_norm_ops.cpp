// Registration of layer norm and RMS norm that are cast at once, and of their derivatives.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

#include "common/empty_on.h"
#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "common/run_on.h"
#include "fp8/arguments.h"
#include "fp8/layer_norm.h"
#include "fp8/operand.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kLayerNormForward = "fp8_layer_norm_cast_transpose";
constexpr const char* kLayerNormBackward = "fp8_layer_norm_backward";

// What the ops have in common, checked. x: [M, N]; weight, bias: [N].
LayerNorm layer_norm_of(const char* op, const char* argument, const at::Tensor& x, const at::Tensor& weight,
                        const MaybeTensor& bias, bool zero_centered) {
    check_strided(op, argument, x);
    TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) > 0 && x.size(1) % kEight == 0, op, ": expected ", argument,
                      " of two dimensions, with columns that ", kEight, " divides, got ", x.sizes());
    const DType dtype = wide_dtype_of(op, argument, x.scalar_type());
    TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat, op,
                     ": expected weight of dtype ", dtype_name(x.scalar_type()), " or torch.float32, got ",
                     dtype_name(weight.scalar_type()));
    check_buffer(op, "weight", weight, {x.size(1)}, x.device());
    if (bias) {
        check_dtype(op, "bias", *bias, weight.scalar_type());
        check_buffer(op, "bias", *bias, {x.size(1)}, x.device());
    }
    return {.sum = nullptr,
            .weight = nullptr,
            .bias = nullptr,
            .mean = nullptr,
            .rstd = nullptr,
            .rows = x.size(0),
            .columns = x.size(1),
            .dtype = dtype,
            .weight_dtype = wide_dtype_of(op, "weight", weight.scalar_type()),
            .zero_centered = zero_centered};
}

// tensor: [M, N], of x's dtype and shape.
void check_like(const char* op, const char* argument, const MaybeTensor& tensor, const at::Tensor& x) {
    if (!tensor) return;
    check_strided(op, argument, *tensor);
    check_dtype(op, argument, *tensor, x.scalar_type());
    check_shape(op, argument, *tensor, x.sizes());
    check_device(op, argument, *tensor, x.device());
}

// tensor: [...].
const void* address_of(const MaybeTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
// tensor: [...].
MaybeTensor aligned(const MaybeTensor& tensor) {
    return tensor ? MaybeTensor(aligned_for_eights(*tensor)) : std::nullopt;
}

// Results are casts of y [M, N] and, or [0] without, [N, padded(M)], and their scale_inv [1]; s [M, N], or [0] without
// a residual; mean, or [0] of RMS norm, and rstd [M].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& x,          // [M, N]
    const MaybeTensor& residual,  // [M, N]
    const at::Tensor& weight,     // [N]
    const MaybeTensor& bias,      // [N]
    double eps, at::ScalarType dtype, bool rms_norm, bool zero_centered,
    const MaybeTensor& scale,  // [] or [1]
    const MaybeTensor& amax,   // [] or [1]
    bool with_transposed) {
    LayerNorm work = layer_norm_of(kLayerNormForward, "x", x, weight, bias, zero_centered);
    format_of(kLayerNormForward, "dtype", dtype);
    TORCH_CHECK_VALUE(eps >= 0, kLayerNormForward, ": expected eps of at least 0, got ", eps);
    check_like(kLayerNormForward, "residual", residual, x);
    scalar_of(kLayerNormForward, "scale", scale, x.device());
    scalar_of(kLayerNormForward, "amax", amax, x.device());
    check_apart(kLayerNormForward, {{"x", x, false},
                                    {"residual", residual, false},
                                    {"weight", weight, false},
                                    {"bias", bias, false},
                                    {"scale", scale, false},
                                    {"amax", amax, true}});
    const at::Device device = x.device();
    const at::Tensor input = aligned_for_eights(x), gain = aligned_for_eights(weight);
    const MaybeTensor more = aligned(residual), shift = aligned(bias);
    const auto like = [&](bool is_wanted, at::IntArrayRef sizes, at::ScalarType type) {
        return empty_on(device, is_wanted ? sizes : at::IntArrayRef{0}, type);
    };
    const at::Tensor sum = like(residual.has_value(), x.sizes(), x.scalar_type());
    const at::Tensor mean = like(!rms_norm, {work.rows}, at::kFloat), rstd = like(true, {work.rows}, at::kFloat);
    const LayerNormStats stats{.x = input.const_data_ptr(),
                               .residual = address_of(more),
                               .sum = more ? sum.data_ptr() : nullptr,
                               .mean = rms_norm ? nullptr : mean.data_ptr<float>(),
                               .rstd = rstd.data_ptr<float>(),
                               .rows = work.rows,
                               .columns = work.columns,
                               .dtype = work.dtype,
                               .eps = static_cast<float>(eps)};
    TE_GRAPH_RUN(device, layer_norm_stats, stats);
    work.sum = more ? stats.sum : stats.x;
    work.weight = gain.const_data_ptr();
    work.bias = address_of(shift);
    work.mean = stats.mean;
    work.rstd = stats.rstd;
    const auto find = [&](const CurrentScale& found) { TE_GRAPH_RUN(device, layer_norm_current_scale, work, found); };
    const auto cast = [&](const Cast& one, const ColumnSums&) { TE_GRAPH_RUN(device, layer_norm_cast, work, one); };
    const Made made{work.rows, work.columns, work.dtype, device, find, cast};
    const Operand operand = cast_made(kLayerNormForward, made, {scale, amax, dtype}, with_transposed);
    note_writes({amax});
    return {operand.data, with_transposed ? operand.transposed : like(false, {}, dtype), operand.scale_inv, sum, mean,
            rstd};
}

// Column sums that an op makes: its result [N], or [0] where they are not asked for or go into `out`, and where they
// go.
struct SumsOut {
    at::Tensor result;  // [N] or [0]
    at::Tensor target;  // [N], that or what was given; undefined: they are not asked for
};
// out: [N], of `dtype`; x: [M, N].
SumsOut sums_out(const char* argument, bool is_asked_for, const MaybeTensor& out, bool accumulate, const at::Tensor& x,
                 at::ScalarType dtype) {
    check_grad_out(kLayerNormBackward, argument, out, is_asked_for, accumulate, dtype, {x.size(1)}, x.device());
    const bool is_result = is_asked_for && !out;
    const at::Tensor result = empty_on(x.device(), {is_result ? x.size(1) : 0}, dtype);
    return {result, is_result ? result : out.value_or(at::Tensor())};
}

// Results are ds [M, N]; with a dtype its casts as above, without three of [0]; the gradients of weight and bias and
// the column sums of ds, [N] or [0], as output_mask asks for them, but not what goes into given tensors.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad,       // [M, N]
    const MaybeTensor& grad_sum,  // [M, N]
    const at::Tensor& sum,        // [M, N]
    const at::Tensor& weight,     // [N]
    const MaybeTensor& mean,      // [M]
    const at::Tensor& rstd,       // [M]
    bool zero_centered, std::optional<at::ScalarType> dtype,
    const MaybeTensor& scale,  // [] or [1]
    const MaybeTensor& amax,   // [] or [1]
    bool with_transposed, std::array<bool, 3> output_mask,
    const MaybeTensor& grad_weight,  // [N]
    bool accumulate_weight,
    const MaybeTensor& grad_bias,  // [N]
    bool accumulate_bias,
    const MaybeTensor& column_sums,  // [N]
    bool accumulate_sums) {
    LayerNormBackward work{.norm = layer_norm_of(kLayerNormBackward, "sum", sum, weight, std::nullopt, zero_centered),
                           .grad = nullptr,
                           .grad_sum = nullptr,
                           .grad_x = nullptr,
                           .row_sums = nullptr,
                           .weight_sums = {},
                           .bias_sums = {},
                           .is_cast = dtype && scale};
    const at::Device device = sum.device();
    const int64_t rows = sum.size(0);
    check_like(kLayerNormBackward, "grad", grad, sum);
    check_like(kLayerNormBackward, "grad_sum", grad_sum, sum);
    for (const auto& [name, statistic] : {std::pair{"mean", mean}, std::pair{"rstd", MaybeTensor(rstd)}}) {
        if (!statistic) continue;
        check_dtype(kLayerNormBackward, name, *statistic, at::kFloat);
        check_buffer(kLayerNormBackward, name, *statistic, {rows}, device);
    }
    if (dtype) format_of(kLayerNormBackward, "dtype", *dtype);
    TORCH_CHECK_VALUE(dtype || !(scale || amax || output_mask[2]), kLayerNormBackward,
                      ": expected a dtype, as scale, amax and column sums are of a cast, got none");
    scalar_of(kLayerNormBackward, "scale", scale, device);
    scalar_of(kLayerNormBackward, "amax", amax, device);
    check_apart(kLayerNormBackward, {{"grad", grad, false},
                                     {"grad_sum", grad_sum, false},
                                     {"sum", sum, false},
                                     {"weight", weight, false},
                                     {"mean", mean, false},
                                     {"rstd", rstd, false},
                                     {"scale", scale, false},
                                     {"amax", amax, true},
                                     {"grad_weight", grad_weight, true},
                                     {"grad_bias", grad_bias, true},
                                     {"column_sums", column_sums, true}});
    const SumsOut of_weight =
        sums_out("grad_weight", output_mask[0], grad_weight, accumulate_weight, sum, weight.scalar_type());
    const SumsOut of_bias =
        sums_out("grad_bias", output_mask[1], grad_bias, accumulate_bias, sum, weight.scalar_type());
    const SumsOut of_x = sums_out("column_sums", output_mask[2], column_sums, accumulate_sums, sum, sum.scalar_type());
    const at::Tensor input = aligned_for_eights(sum), gain = aligned_for_eights(weight), dy = aligned_for_eights(grad);
    const MaybeTensor more = aligned(grad_sum);
    const at::Tensor grad_x = empty_on(device, sum.sizes(), sum.scalar_type());
    const at::Tensor row_sums = empty_on(device, {rows, 2}, at::kFloat);
    work.norm.sum = input.const_data_ptr();
    work.norm.weight = gain.const_data_ptr();
    work.norm.mean = mean ? mean->const_data_ptr<float>() : nullptr;
    work.norm.rstd = rstd.const_data_ptr<float>();
    work.grad = dy.const_data_ptr();
    work.grad_sum = address_of(more);
    work.grad_x = grad_x.data_ptr();
    work.row_sums = row_sums.data_ptr<float>();
    const Sums weight_sums = sums_into(kLayerNormBackward, of_weight.target, rows, accumulate_weight);
    const Sums bias_sums = sums_into(kLayerNormBackward, of_bias.target, rows, accumulate_bias);
    work.weight_sums = weight_sums.sums;
    work.bias_sums = bias_sums.sums;

    Operand operand;
    const auto find = [](const CurrentScale&) {};
    const auto cast = [&](const Cast& one, const ColumnSums& sums) {
        TE_GRAPH_RUN(device, layer_norm_backward, work, one, sums);
    };
    const Made made{rows, work.norm.columns, work.norm.dtype, device, find, cast};
    if (work.is_cast) {
        operand =
            cast_made(kLayerNormBackward, made, {scale, amax, *dtype}, with_transposed, of_x.target, accumulate_sums);
    } else {
        Cast sizes{};
        sizes.rows = rows;
        sizes.columns = work.norm.columns;
        cast(sizes, {});
        // Under current scaling all of ds has to be there before any of it is cast.
        if (dtype) {
            operand = cast_operand(kLayerNormBackward, grad_x, {scale, amax, *dtype}, with_transposed, of_x.target,
                                   accumulate_sums);
        }
    }
    note_writes({amax, grad_weight, grad_bias, column_sums});
    const auto or_empty = [&](const at::Tensor& tensor, at::ScalarType type) {
        return tensor.defined() ? tensor : empty_on(device, {0}, type);
    };
    const at::ScalarType fp8 = dtype.value_or(at::kFloat8_e4m3fn);
    return {grad_x,
            or_empty(operand.data, fp8),
            or_empty(operand.transposed, fp8),
            or_empty(operand.scale_inv, at::kFloat),
            of_weight.result,
            of_bias.result,
            of_x.result};
}

// Shapes alone. x, residual [M, N]; weight, bias [N]; scale, amax [] or [1] -> as forward.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_forward_meta(
    const at::Tensor& x, const MaybeTensor& residual, const at::Tensor& weight, const MaybeTensor& bias, double,
    at::ScalarType dtype, bool rms_norm, bool, const MaybeTensor& scale, const MaybeTensor& amax,
    bool with_transposed) {
    check_devices(kLayerNormForward, x.device(),
                  {{"residual", residual}, {"weight", weight}, {"bias", bias}, {"scale", scale}, {"amax", amax}});
    const auto [out, out_t, scale_inv] = casts_meta(x, x.sym_size(1), dtype, with_transposed);
    const auto statistics = x.options().dtype(at::kFloat);
    const c10::SymInt rows = x.sym_size(0);
    return {out,
            out_t,
            scale_inv,
            residual ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options()),
            rms_norm ? at::empty({0}, statistics) : at::empty_symint({rows}, statistics),
            at::empty_symint({rows}, statistics)};
}
// grad, grad_sum, sum [M, N]; weight, grad_weight, grad_bias, column_sums [N]; mean, rstd [M]; scale, amax [] or [1] ->
// as backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_backward_meta(
    const at::Tensor& grad, const MaybeTensor& grad_sum, const at::Tensor& sum, const at::Tensor& weight,
    const MaybeTensor& mean, const at::Tensor& rstd, bool, std::optional<at::ScalarType> dtype,
    const MaybeTensor& scale, const MaybeTensor& amax, bool with_transposed, std::array<bool, 3> output_mask,
    const MaybeTensor& grad_weight, bool, const MaybeTensor& grad_bias, bool, const MaybeTensor& column_sums, bool) {
    check_devices(kLayerNormBackward, sum.device(),
                  {{"grad", grad},
                   {"grad_sum", grad_sum},
                   {"weight", weight},
                   {"mean", mean},
                   {"rstd", rstd},
                   {"scale", scale},
                   {"amax", amax},
                   {"grad_weight", grad_weight},
                   {"grad_bias", grad_bias},
                   {"column_sums", column_sums}});
    const auto none = [&](at::ScalarType type) { return at::empty({0}, sum.options().dtype(type)); };
    const at::ScalarType fp8 = dtype.value_or(at::kFloat8_e4m3fn);
    auto casts = dtype ? casts_meta(sum, sum.sym_size(1), fp8, with_transposed)
                       : std::tuple{none(fp8), none(fp8), none(at::kFloat)};
    const auto sums = [&](int which, const MaybeTensor& given, at::ScalarType type) {
        const bool is_result = output_mask[which] && !given;
        return is_result ? at::empty_symint({sum.sym_size(1)}, sum.options().dtype(type)) : none(type);
    };
    return {at::empty_symint(sum.sym_sizes(), sum.options()),
            std::get<0>(casts),
            std::get<1>(casts),
            std::get<2>(casts),
            sums(0, grad_weight, weight.scalar_type()),
            sums(1, grad_bias, weight.scalar_type()),
            sums(2, column_sums, sum.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kLayerNormForward, layer_norm_forward);
    m.impl(kLayerNormBackward, layer_norm_backward);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kLayerNormForward, layer_norm_forward_meta);
    m.impl(kLayerNormBackward, layer_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kLayerNormForward, kLayerNormBackward}) m.impl(name, no_derivative());
}

}  // namespace te_graph::fp8
