#include "fp8/operand.h"

#include "common/empty_on.h"
#include "common/run_on.h"
#include "fp8/arguments.h"
#include "fp8/scale.h"

namespace te_graph::fp8 {
namespace {

// The scale by which the amax of x [M, N] becomes the largest number of `format`: [1] fp32.
at::Tensor find_scale(const char* op, const at::Tensor& x, Format format) {
    // The amax, the scale, and the kernel's scratch of two words.
    const at::Tensor found = empty_on(x.device(), {4}, at::kFloat);
    auto* const words = static_cast<float*>(found.data_ptr());
    const CurrentScale work{.input = x.const_data_ptr(),
                            .numel = x.numel(),
                            .dtype = wide_dtype_of(op, "x", x.scalar_type()),
                            .amax = words,
                            .scale = words + 1,
                            .state = reinterpret_cast<uint32_t*>(words + 2),
                            .rule = {.scaled_max = max_of(format)}};
    TE_GRAPH_RUN(x.device(), current_scale, work);
    return found.narrow(0, 1, 1);
}

}  // namespace

Sums sums_into(const char* op, const at::Tensor& out, const at::Tensor& x, bool accumulate) {
    Sums result;
    if (!out.defined()) return result;
    if (!x.device().is_cpu()) {
        result.scratch = empty_on(x.device(), {tiles_in(x.size(0)), x.size(1)}, at::kFloat);
        result.sums.partial = static_cast<float*>(result.scratch.data_ptr());
    }
    result.sums.out = out.data_ptr();
    result.sums.dtype = wide_dtype_of(op, "dbias", out.scalar_type());
    result.sums.accumulate = accumulate;
    return result;
}

Operand cast_operand(const char* op, const at::Tensor& x, const Scaling& scaling, bool with_transposed,
                     const at::Tensor& column_sums, bool accumulate_sums) {
    const Format format = format_of(op, "dtype", scaling.dtype);
    const at::Tensor scale = scaling.scale ? *scaling.scale : find_scale(op, x, format);
    Operand operand;
    operand.data = empty_on(x.device(), x.sizes(), scaling.dtype);
    operand.scale_inv = empty_on(x.device(), {1}, at::kFloat);
    if (with_transposed) operand.transposed = empty_on(x.device(), {x.size(1), padded(x.size(0))}, scaling.dtype);
    const Cast work{.input = x.const_data_ptr(),
                    .out = static_cast<uint8_t*>(operand.data.data_ptr()),
                    .out_t = with_transposed ? static_cast<uint8_t*>(operand.transposed.data_ptr()) : nullptr,
                    .scale = scalar_of(op, "scale", scale, x.device()),
                    .scale_inv = operand.scale_inv.data_ptr<float>(),
                    .amax = scalar_of(op, "amax", scaling.amax, x.device()),
                    .counts = nullptr,
                    .rows = x.size(0),
                    .columns = x.size(1),
                    .dtype = wide_dtype_of(op, "x", x.scalar_type()),
                    .format = format,
                    .pads_out_t = true,
                    .reserved = {}};
    if (with_transposed || column_sums.defined()) {
        const Sums column = sums_into(op, column_sums, x, accumulate_sums);
        TE_GRAPH_RUN(x.device(), cast_transpose, work, column.sums, {});
    } else {
        TE_GRAPH_RUN(x.device(), cast, work, {});
    }
    return operand;
}

}  // namespace te_graph::fp8
