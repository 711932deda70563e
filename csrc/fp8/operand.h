// What a matrix product needs of a tensor: its cast, the transposed cast, and what multiplies them back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <optional>
#include <tuple>
#include <vector>

#include "fp8/cast.h"
#include "fp8/scale.h"

namespace te_graph::fp8 {

// x: [..., N] -> [M, N], contiguous.
at::Tensor as_matrix(const at::Tensor& x);
// shape, with `size` as its last one.
template <typename Size>
std::vector<Size> with_last(c10::ArrayRef<Size> shape, Size size) {
    std::vector<Size> result = shape.vec();
    result.back() = size;
    return result;
}

// Where column sums go, and the scratch of their kernels.
struct Sums {
    ColumnSums sums;
    at::Tensor scratch;  // [tiles_in(M), N]
};
// out: [N], written, or added to, or undefined; rows: M.
Sums sums_into(const char* op, const at::Tensor& out, int64_t rows, bool accumulate = false);

struct Operand {
    at::Tensor data;        // [M, N]
    at::Tensor transposed;  // [N, padded(M)]; undefined: not asked for
    at::Tensor scale_inv;   // [1] fp32
};

// How the scale of a cast is found.
struct Scaling {
    std::optional<at::Tensor> scale;  // [] or [1] fp32; nothing: that of current scaling, found first
    std::optional<at::Tensor> amax;   // [] or [1] fp32, maxed into; nothing: not recorded
    at::ScalarType dtype;             // of the cast
};

// Kernels that make what they cast take eight elements of a row at a time.
constexpr int64_t kEight = 8;
// x: [...] -> contiguous, at a multiple of 16 bytes.
at::Tensor aligned_for_eights(const at::Tensor& x);

// A matrix that is made where it is cast, and is in no memory.
struct Made {
    int64_t rows, columns;
    DType dtype;
    at::Device device;
    // Launch what finds its scale, or casts it. `input` of what they get is not set.
    c10::function_ref<void(const CurrentScale&)> find_scale;
    c10::function_ref<void(const Cast&, const ColumnSums&)> cast;
};
// column_sums: [N], written, or added to, fp32 or of the dtype of what is made, or undefined.
Operand cast_made(const char* op, const Made& made, const Scaling& scaling, bool with_transposed,
                  const at::Tensor& column_sums = {}, bool accumulate_sums = false);
// The same of x [M, N] fp32, fp16 or bf16, contiguous; column_sums [N].
Operand cast_operand(const char* op, const at::Tensor& x, const Scaling& scaling, bool with_transposed,
                     const at::Tensor& column_sums = {}, bool accumulate_sums = false);
// Shapes alone: of casts of what is made of x [M, ...], [M, columns], [columns, padded(M)], or [0], and [1].
std::tuple<at::Tensor, at::Tensor, at::Tensor> casts_meta(const at::Tensor& x, const c10::SymInt& columns,
                                                          at::ScalarType dtype, bool with_transposed);

}  // namespace te_graph::fp8
