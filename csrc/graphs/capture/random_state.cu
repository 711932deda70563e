// Grid: one thread. Bytes: 16 written.
#include "graphs/capture/random_state.h"

namespace te_graph::graphs {
namespace {

__global__ void set_random_state_kernel(RandomState state, uint64_t seed, uint64_t offset) {
    *state.seed = static_cast<int64_t>(seed);
    *state.offset = static_cast<int64_t>(offset);
}

}  // namespace

cudaError_t launch_set_random_state(RandomState state, uint64_t seed, uint64_t offset, cudaStream_t stream) {
    set_random_state_kernel<<<1, 1, 0, stream>>>(state, seed, offset);
    return cudaGetLastError();
}

}  // namespace te_graph::graphs
