// Products of FP8 matrices in tensors, for the ops of this area.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace te_graph::fp8 {

// out = a_scale_inv * b_scale_inv * (a · bᵀ) + bias, rounded (and then + out, rounded again).
struct Product {
    const at::Tensor& out;                // [M, N] fp32, fp16 or bf16, contiguous
    const at::Tensor& a;                  // [M, K] FP8, rows contiguous
    const at::Tensor& b;                  // [N, K] FP8, rows contiguous
    const at::Tensor& a_scale_inv;        // [1] fp32
    const at::Tensor& b_scale_inv;        // [1] fp32
    std::optional<at::Tensor> bias = {};  // [N] of any of out's dtypes
    bool fast_accum = false;              // adds up with fewer bits
    bool accumulate = false;              // adds to out
};

// On out's device: by cuBLASLt, or, where that multiplies no FP8 matrices, in fp32. Nothing is checked but addresses,
// which views may have.
void multiply(const char* op, const Product& product);

}  // namespace te_graph::fp8
