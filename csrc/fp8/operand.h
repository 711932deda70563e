// What a matrix product needs of a tensor: its cast, the transposed cast, and what multiplies them back.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "fp8/cast.h"

namespace te_graph::fp8 {

// Where column sums go, and the scratch of their kernels.
struct Sums {
    ColumnSums sums;
    at::Tensor scratch;  // [tiles_in(M), N]
};
// out: [N], written, or added to, fp32 or of x's dtype, or undefined; x: [M, N].
Sums sums_into(const char* op, const at::Tensor& out, const at::Tensor& x, bool accumulate = false);

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

// x: [M, N] fp32, fp16 or bf16, contiguous. column_sums: [N], written, or added to, fp32 or of x's dtype, or undefined.
Operand cast_operand(const char* op, const at::Tensor& x, const Scaling& scaling, bool with_transposed,
                     const at::Tensor& column_sums = {}, bool accumulate_sums = false);

}  // namespace te_graph::fp8
