// How many blocks of a kernel run at the same time.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace te_graph {

// Of the current device; 0 if it cannot be asked.
inline int64_t multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

// Of `threads` each, on the current device, but no more than `most`.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int64_t most) {
    int resident = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0);
    return std::min(most, multiprocessors() * resident);
}

}  // namespace te_graph
