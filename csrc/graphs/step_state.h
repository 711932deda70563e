// What kernels of a step read instead of arguments that a graph would freeze: one small block in device memory. No
// Torch.
#pragma once

#include <cstdint>

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "common/host_device.h"

namespace te_graph::graphs {

// 64 bytes of int32. The flags are set from the host, when they change; the counters go on by themselves.
struct StepState {
    int32_t is_first_microbatch;
    int32_t skip_weight_cast;  // not is_first_microbatch: the `noop` of a captured weight cast
    int32_t update_weight_scale_inv;
    int32_t step;
    int32_t microbatch;
    int32_t reserved[11];
};
static_assert(sizeof(StepState) == 64);

inline void set_flags_cpu(StepState* state, bool is_first_microbatch, bool update_weight_scale_inv) {
    state->is_first_microbatch = is_first_microbatch;
    state->skip_weight_cast = !is_first_microbatch;
    state->update_weight_scale_inv = update_weight_scale_inv;
}

// One micro-batch on: the first one of a step is number 0.
TE_GRAPH_HOST_DEVICE inline void advance(StepState* state) {
    const bool is_first = state->is_first_microbatch != 0;
    state->step += is_first;
    state->microbatch = is_first ? 0 : state->microbatch + 1;
}

#ifdef TE_GRAPH_CUDA
// The values travel as kernel arguments: nothing on the host has to outlive the launch.
cudaError_t launch_set_flags(StepState* state, bool is_first_microbatch, bool update_weight_scale_inv,
                             cudaStream_t stream);
cudaError_t launch_advance(StepState* state, cudaStream_t stream);
#endif

}  // namespace te_graph::graphs
