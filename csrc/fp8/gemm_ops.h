// Products of FP8 matrices in tensors, for the ops of this area.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace te_graph::fp8 {

// out = a_scale_inv * b_scale_inv * (a · bᵀ) + bias, rounded (and then + out, rounded again), on out's device: by
// cuBLASLt, or, where that multiplies no FP8 matrices, in fp32. Nothing is checked but addresses, which views may have.
// out: [M, N] fp32, fp16 or bf16, contiguous; a: [M, K], b: [N, K] of FP8, rows contiguous; a_scale_inv, b_scale_inv:
// [1] fp32; bias: [N] of any of out's dtypes.
void multiply(const char* op, const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
              const at::Tensor& a_scale_inv, const at::Tensor& b_scale_inv, const std::optional<at::Tensor>& bias,
              bool fast_accum, bool accumulate);

// Whether a GPU multiplies FP8 matrices; elsewhere it is done in fp32.
bool multiplies_fp8(at::Device device);

}  // namespace te_graph::fp8
