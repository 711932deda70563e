// How many blocks of a kernel run at the same time.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace te_graph {

// Of `threads` each, on the current device, but no more than `most`.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int64_t most) {
    int device = 0, multiprocessors = 0, resident = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0);
    return std::min(most, int64_t{multiprocessors} * resident);
}

}  // namespace te_graph
