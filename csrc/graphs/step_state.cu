// Grid: one thread. Bytes: the block.
#include "graphs/step_state.h"

namespace te_graph::graphs {
namespace {

__global__ void step_state_set_kernel(StepState* state, bool is_first_microbatch, bool update_weight_scale_inv) {
    state->is_first_microbatch = is_first_microbatch;
    state->skip_weight_cast = !is_first_microbatch;
    state->update_weight_scale_inv = update_weight_scale_inv;
}

__global__ void step_state_advance_kernel(StepState* state) { advance(state); }

}  // namespace

cudaError_t launch_set_flags(StepState* state, bool is_first_microbatch, bool update_weight_scale_inv,
                             cudaStream_t stream) {
    step_state_set_kernel<<<1, 1, 0, stream>>>(state, is_first_microbatch, update_weight_scale_inv);
    return cudaGetLastError();
}

cudaError_t launch_advance(StepState* state, cudaStream_t stream) {
    step_state_advance_kernel<<<1, 1, 0, stream>>>(state);
    return cudaGetLastError();
}

}  // namespace te_graph::graphs
