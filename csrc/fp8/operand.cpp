#include "fp8/operand.h"

#include "common/empty_on.h"
#include "common/run_on.h"
#include "fp8/arguments.h"
#include "fp8/scale.h"

namespace te_graph::fp8 {
namespace {

// The scale by which the amax of what is made becomes the largest number of `format`: [1] fp32.
at::Tensor find_scale(const Made& made, Format format) {
    // The amax, the scale, and the kernel's scratch of two words.
    const at::Tensor found = empty_on(made.device, {4}, at::kFloat);
    auto* const words = found.data_ptr<float>();
    made.find_scale({.input = nullptr,
                     .numel = made.rows * made.columns,
                     .dtype = made.dtype,
                     .amax = words,
                     .scale = words + 1,
                     .state = reinterpret_cast<uint32_t*>(words + 2),
                     .rule = {.scaled_max = max_of(format)}});
    return found.narrow(0, 1, 1);
}

}  // namespace

// x: [..., N].
at::Tensor as_matrix(const at::Tensor& x) {
    if (x.dim() == 2 && x.is_contiguous()) return x;
    const int64_t columns = x.size(-1);
    return x.reshape({columns == 0 ? 0 : x.numel() / columns, columns}).contiguous();
}

Sums sums_into(const char* op, const at::Tensor& out, int64_t rows, bool accumulate) {
    Sums result;
    if (!out.defined()) return result;
    if (!out.device().is_cpu()) {
        result.scratch = empty_on(out.device(), {tiles_in(rows), out.size(0)}, at::kFloat);
        result.sums.partial = static_cast<float*>(result.scratch.data_ptr());
    }
    result.sums.out = out.data_ptr();
    result.sums.dtype = wide_dtype_of(op, "dbias", out.scalar_type());
    result.sums.accumulate = accumulate;
    return result;
}

// x: [...].
at::Tensor aligned_for_eights(const at::Tensor& x) {
    const at::Tensor dense = x.contiguous();
    return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

// column_sums: [N].
Operand cast_made(const char* op, const Made& made, const Scaling& scaling, bool with_transposed,
                  const at::Tensor& column_sums, bool accumulate_sums) {
    const Format format = format_of(op, "dtype", scaling.dtype);
    const at::Tensor scale = scaling.scale ? *scaling.scale : find_scale(made, format);
    Operand operand;
    operand.data = empty_on(made.device, {made.rows, made.columns}, scaling.dtype);
    operand.scale_inv = empty_on(made.device, {1}, at::kFloat);
    if (with_transposed) {
        operand.transposed = empty_on(made.device, {made.columns, padded(made.rows)}, scaling.dtype);
    }
    const Sums sums = sums_into(op, column_sums, made.rows, accumulate_sums);
    made.cast({.input = nullptr,
               .out = static_cast<uint8_t*>(operand.data.data_ptr()),
               .out_t = with_transposed ? static_cast<uint8_t*>(operand.transposed.data_ptr()) : nullptr,
               .scale = scalar_of(op, "scale", scale, made.device),
               .scale_inv = operand.scale_inv.data_ptr<float>(),
               .amax = scalar_of(op, "amax", scaling.amax, made.device),
               .counts = nullptr,
               .rows = made.rows,
               .columns = made.columns,
               .dtype = made.dtype,
               .format = format,
               .pads_out_t = true,
               .reserved = {}},
              sums.sums);
    return operand;
}

// x: [M, N]; column_sums: [N].
Operand cast_operand(const char* op, const at::Tensor& x, const Scaling& scaling, bool with_transposed,
                     const at::Tensor& column_sums, bool accumulate_sums) {
    const auto find = [&](CurrentScale work) {
        work.input = x.const_data_ptr();
        TE_GRAPH_RUN(x.device(), current_scale, work);
    };
    const auto cast = [&](Cast work, const ColumnSums& sums) {
        work.input = x.const_data_ptr();
        if (work.out_t != nullptr || sums.out != nullptr) {
            TE_GRAPH_RUN(x.device(), cast_transpose, work, sums, {});
        } else {
            TE_GRAPH_RUN(x.device(), cast, work, {});
        }
    };
    const Made made{x.size(0), x.size(1), wide_dtype_of(op, "x", x.scalar_type()), x.device(), find, cast};
    return cast_made(op, made, scaling, with_transposed, column_sums, accumulate_sums);
}

// x: [M, ...].
std::tuple<at::Tensor, at::Tensor, at::Tensor> casts_meta(const at::Tensor& x, const c10::SymInt& columns,
                                                          at::ScalarType dtype, bool with_transposed) {
    const auto options = x.options().dtype(dtype);
    const c10::SymInt rows = x.sym_size(0);
    return {at::empty_symint({rows, columns}, options),
            with_transposed ? at::empty_symint({columns, padded(rows)}, options) : at::empty({0}, options),
            at::empty({1}, x.options().dtype(at::kFloat))};
}

}  // namespace te_graph::fp8
