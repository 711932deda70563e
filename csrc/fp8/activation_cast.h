// Activations whose results are cast to FP8 at once, and their derivatives. No Torch here.
//
// The casts, amaxes and column sums are those of cast.h of the results, rounded to the dtype of x, which are written
// nowhere.
#pragma once

#include "fp8/activation.h"
#include "fp8/cast.h"
#include "fp8/scale.h"

namespace te_graph::fp8 {

// y: [rows, columns], columns a multiple of 8; x and grad at multiples of 16 bytes.
struct ActivationArguments {
    const void* x;     // [rows, columns], or gated [rows, 2 * columns], of `dtype`
    const void* grad;  // [rows, columns], of y, for a gradient
    int64_t rows, columns;
    DType dtype;
    Activation activation;
    bool is_gated;
    bool is_backward;  // the gradient of x is made, else y
};
// Of what is made.
constexpr int64_t columns_made(const ActivationArguments& work) {
    return work.is_backward && work.is_gated ? 2 * work.columns : work.columns;
}

// cast: of what is made, [rows, columns_made]; its input is not looked at. sums: of a gradient alone.
void activation_cast_cpu(const ActivationArguments& work, const Cast& cast, const ColumnSums& sums);
// scale: of what is made; its input is not looked at.
void activation_current_scale_cpu(const ActivationArguments& work, const CurrentScale& scale);

#ifdef TE_GRAPH_CUDA
// No allocation, no host sync.
cudaError_t launch_activation_cast(const ActivationArguments& work, const Cast& cast, const ColumnSums& sums,
                                   cudaStream_t stream);
// A memset of 8 bytes and one launch.
cudaError_t launch_activation_current_scale(const ActivationArguments& work, const CurrentScale& scale,
                                            cudaStream_t stream);
#endif

}  // namespace te_graph::fp8
