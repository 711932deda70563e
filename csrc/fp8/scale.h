// Scales: from the amax of a tensor, and from the history of these. No Torch here.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/dtype.h"
#include "common/kernel_info.h"
#include "fp8/flag.h"
#include "fp8/format.h"
#include "fp8/strided.h"

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace te_graph::fp8 {

// How a scale follows from an amax:
//   a = max(amax, eps); a of 0, Inf or NaN gives 1; else scaled_max / a, and FLT_MAX where that overflows.
struct ScaleRule {
    float scaled_max;  // the format's largest number * 2^-margin
    float eps = 0;
    bool power_of_2 = false;  // rounded down to one
};

// True for what a scale can be computed from: positive and finite.
TE_GRAPH_HOST_DEVICE inline bool is_usable(float amax) { return amax > 0 && amax <= FLT_MAX; }

// `amax` is usable. Host and device divide alike: correctly rounded.
TE_GRAPH_HOST_DEVICE inline float scale_of(float amax, float scaled_max) {
    const float scale = scaled_max / amax;
    return scale <= FLT_MAX ? scale : FLT_MAX;
}

TE_GRAPH_HOST_DEVICE inline float scale_of(float amax, const ScaleRule& rule) {
    const float a = amax < rule.eps ? rule.eps : amax;
    if (!is_usable(a)) return 1;
    float scale = scale_of(a, rule.scaled_max);
    if (rule.power_of_2) {
        uint32_t bits;
        memcpy(&bits, &scale, sizeof(bits));
        // The mantissa goes; of a subnormal number, which has nothing else, its first digit stays.
        if (bits >= 0x00800000u) {
            bits &= 0xFF800000u;
        } else {
            for (int shift = 1; shift < 32; shift *= 2) bits |= bits >> shift;
            bits ^= bits >> 1;
        }
        memcpy(&scale, &bits, sizeof(bits));
    }
    return scale;
}

// The scale after an update: of the amax where that is usable, else as before; never infinite.
TE_GRAPH_HOST_DEVICE inline float next_scale(float amax, float scaled_max, float previous) {
    if (is_usable(amax)) return scale_of(amax, scaled_max);
    return previous > FLT_MAX || previous < -FLT_MAX ? FLT_MAX : previous;
}

// Delayed scaling of one table of columns; row 0 of the history is what the casts since the last update left there.
//
//   m = history[0] or the maximum of the column (NaNs left out), before the roll
//   scale = scale_of(m), where m is usable; else as it was; FLT_MAX instead of infinity
//   history[i] = history[i + 1] for 0 < i < height - 1, history[height - 1] = history[0], history[0] = 0
//   scale_inv = 1 / scale, correctly rounded: where the mask is set or there is none, or the flag is set
//
// A column whose history[0] is 0 did not run: its history and scale stay. Of one whose history[0] is Inf or NaN, with
// `skip_nonfinite`, only that is cleared.
struct Update {
    float* history;  // [height, columns], element (i, j) at i * row_stride + j * column_stride
    int64_t row_stride, column_stride;
    int height, columns;
    Strided<float> scale, scale_inv;  // [columns]
    Strided<const bool> mask;         // [columns]: not a weight; nullptr: all are not
    Flag flag;                        // update_weight_scale_inv, read by the kernel; none: the next one
    bool update_weight_scale_inv;
    float scaled_max;
    bool most_recent;  // else the maximum
    bool skip_nonfinite;
};

// amax: max |x| with NaNs passed on (any x: [numel]), and the scale that follows from it.
struct CurrentScale {
    const void* input;  // [numel]
    int64_t numel;
    DType dtype;
    float* amax;      // [1]
    float* scale;     // [1]
    uint32_t* state;  // [2], scratch of the kernel
    ScaleRule rule;
};

void amax_and_scale_update_cpu(const Update& update);
void current_scale_cpu(const CurrentScale& work);
void scale_cpu(const float* amax, float* scale, int64_t count, const ScaleRule& rule);  // [count] both

#ifdef TE_GRAPH_CUDA
// No allocation, no host sync. One launch each; current_scale has a memset of 8 bytes before it.
cudaError_t launch_amax_and_scale_update(const Update& update, cudaStream_t stream);
cudaError_t launch_current_scale(const CurrentScale& work, cudaStream_t stream);
cudaError_t launch_scale(const float* amax, float* scale, int64_t count, const ScaleRule& rule, cudaStream_t stream);

// Those whose `update_weight_scale_inv` is a number.
std::vector<KernelFunction> amax_and_scale_update_kernels();
#endif

}  // namespace te_graph::fp8
