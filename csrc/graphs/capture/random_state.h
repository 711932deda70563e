// The state of a generator of random numbers, as the kernels of a graph read it. Empty where te_graph is built without
// CUDA.
#pragma once

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>

#include <cstdint>

namespace te_graph::graphs {

// seed, offset: [1] int64 each, on the device, written on `stream`.
struct RandomState {
    int64_t *seed, *offset;
};
cudaError_t launch_set_random_state(RandomState state, uint64_t seed, uint64_t offset, cudaStream_t stream);

}  // namespace te_graph::graphs
#endif
