// Layer norm and RMS norm whose results are cast to FP8 at once, and their derivatives. No Torch here.
//
//   s     = x + residual, rounded to the dtype of both
//   mean  = sum(s) / N, rstd = 1 / sqrt(sum((s - mean)^2) / N + eps); RMS norm: mean = 0
//   n     = (s - mean) * rstd
//   y     = n * g + bias, rounded to the dtype; g = weight, or 1 + weight
//
//   dn    = dy * g
//   ds    = (dn - (n * sum(dn * n) + sum(dn)) * (1 / N)) * rstd, rounded, + grad_sum, rounded; RMS norm: no sum(dn)
//   dweight, dbias = column sums (cast.h) of dy * n and of dy
//
// Sums of rows are those of 32 lanes, lane l adding the elements of the eights l, l + 32, l + 64, ... one after the
// other; then lanes 16 apart are added, 8, 4, 2, and 1 apart. All in fp32, each step rounded: the bits of the CPU loops
// and of the kernels are the same.
#pragma once

#include "fp8/cast.h"
#include "fp8/scale.h"

namespace te_graph::fp8 {

constexpr int kRowLanes = 32;

// Matrices are [rows, columns], contiguous, of `dtype`, at multiples of 16 bytes, columns a multiple of 8.
struct LayerNorm {
    const void* sum;     // s
    const void* weight;  // [columns], of weight_dtype
    const void* bias;    // [columns], of weight_dtype; nullptr: none
    const float* mean;   // [rows]; nullptr: RMS norm
    const float* rstd;   // [rows]
    int64_t rows, columns;
    DType dtype, weight_dtype;
    bool zero_centered;  // g = 1 + weight
};

struct LayerNormStats {
    const void* x;
    const void* residual;  // nullptr: none
    void* sum;             // written; nullptr without a residual
    float* mean;           // [rows], written; nullptr: RMS norm
    float* rstd;           // [rows], written
    int64_t rows, columns;
    DType dtype;
    float eps;
};

struct LayerNormBackward {
    LayerNorm norm;
    const void* grad;      // dy
    const void* grad_sum;  // nullptr: none
    void* grad_x;          // ds, written
    float* row_sums;       // [rows, 2]: of dn * n, of dn; scratch of the kernels
    ColumnSums weight_sums, bias_sums;
    bool is_cast;  // ds, too
};

// cast: of y; `input` is not looked at.
void layer_norm_stats_cpu(const LayerNormStats& work);
void layer_norm_cast_cpu(const LayerNorm& work, const Cast& cast);
// scale: of y; `input` is not looked at.
void layer_norm_current_scale_cpu(const LayerNorm& work, const CurrentScale& scale);
// cast: of ds, with its column sums; of its rows and columns alone where it is not cast.
void layer_norm_backward_cpu(const LayerNormBackward& work, const Cast& cast, const ColumnSums& sums);

#ifdef TE_GRAPH_CUDA
// No allocation, no host sync.
cudaError_t launch_layer_norm_stats(const LayerNormStats& work, cudaStream_t stream);
cudaError_t launch_layer_norm_cast(const LayerNorm& work, const Cast& cast, cudaStream_t stream);
// A memset of 8 bytes and one launch.
cudaError_t launch_layer_norm_current_scale(const LayerNorm& work, const CurrentScale& scale, cudaStream_t stream);
// A launch for the sums of rows, one for the rest, and one that ends column sums.
cudaError_t launch_layer_norm_backward(const LayerNormBackward& work, const Cast& cast, const ColumnSums& sums,
                                       cudaStream_t stream);
#endif

}  // namespace te_graph::fp8
