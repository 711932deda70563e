// In-place changes of all tensors of a list: multiplied by one factor, clipped to a norm, or set to zero. No Torch
// here.
//
//   scale: x = x * factor                                                              factor from host or device
//   clip:  x = x * c,  c = min(1, 1 / (total_norm + eps) * max_norm),  NaN if the norm is
//
// Products are taken in fp32 (fp64 for fp64 tensors) and rounded once to the tensor's dtype. Where the factor is 1,
// nothing is read or written: a launch that has nothing to clip costs a few microseconds, and its tensors stay as they
// are, bit for bit.
#pragma once

#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

// A number on the device, or on the host where `data` is nullptr.
struct Scalar {
    const void* data = nullptr;  // [1], fp32 or fp64
    bool is_double = false;
    double value = 1;
};

// What torch adds to a norm before it divides by it.
constexpr double kClipEps = 1e-6;

struct Scaling {
    Scalar scale;  // the factor; of a clip, the total norm
    bool is_clip = false;
    double max_norm = 0;
    double eps = 0;
    float* found_inf = nullptr;  // [1]
};
// found_inf of scale: set to 1 if a result is not finite.
// found_inf of clip: set to 1 if the norm is not finite; where it is not 0 then, nothing is written.

void scale_cpu(const TensorTable& tensors, const Scaling& scaling);
void zero_cpu(const TensorTable& tensors);

#ifdef TE_GRAPH_CUDA
// No allocation, no host sync. One launch for a table or up to kInlineTensors entries, else several.
cudaError_t launch_scale(const TensorTable& tensors, const Scaling& scaling, cudaStream_t stream);
cudaError_t launch_zero(const TensorTable& tensors, cudaStream_t stream);
#endif

}  // namespace te_graph::multi_tensor
