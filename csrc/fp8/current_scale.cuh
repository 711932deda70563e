// Current scaling: the scale of all elements that the threads of a launch have looked at.
#pragma once

#include <algorithm>

#include "common/resident_blocks.cuh"
#include "fp8/element.cuh"
#include "fp8/scale.h"

namespace te_graph::fp8 {

// |x| as an unsigned number, which is in the order of the numbers, with NaNs above infinity: so they are passed on.
template <typename T>
__device__ unsigned amax_bits(T x) {
    return __float_as_uint(fabsf(widen(x)));
}

// amax: the largest amax_bits() that this thread found. Called once by all threads, kThreads a block; the last block
// through computes the scale.
__device__ inline void finish_current_scale(const CurrentScale& work, unsigned amax) {
    __shared__ unsigned largest[kWarps];
    amax = __reduce_max_sync(0xFFFFFFFFu, amax);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < kWarps; ++warp) amax = max(amax, largest[warp]);
    atomicMax(&work.state[0], amax);
    __threadfence();
    if (atomicAdd(&work.state[1], 1u) != gridDim.x - 1) return;
    __threadfence();
    const unsigned bits = atomicMax(&work.state[0], 0u);
    *work.amax = __uint_as_float(bits > 0x7F800000u ? 0x7FC00000u : bits);
    *work.scale = scale_of(*work.amax, work.rule);
}

// Of what a source makes (cast_tile.cuh).
// Grid: as many blocks of 256 threads as are resident, each taking every n-th group of 256 eights.
// Bytes: what the source reads. Determinism: the maximum of bits, in any order.
template <typename Source, typename Arguments>
__global__ void __launch_bounds__(kThreads)
    fp8_current_scale_of_source_kernel(const Arguments work, int64_t rows, int64_t columns, const CurrentScale scale) {
    const int64_t across = columns / 8, eights = rows * across;
    unsigned amax = 0;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < eights; i += int64_t{gridDim.x} * kThreads) {
        Source source(work, {i / across, i % across * 8});
        const auto loaded = source.template load<true>(0, 8);
        source.prepare();
        const auto made = source.make(0, loaded, true);
#pragma unroll
        for (int k = 0; k < 8; ++k) amax = max(amax, amax_bits(made.values[k]));
    }
    finish_current_scale(scale, amax);
}

template <typename Source, typename Arguments>
cudaError_t launch_current_scale_of(const Arguments& work, int64_t rows, int64_t columns, const CurrentScale& scale,
                                    cudaStream_t stream) {
    const cudaError_t error = cudaMemsetAsync(scale.state, 0, 2 * sizeof(uint32_t), stream);
    if (error != cudaSuccess) return error;
    const int64_t needed = std::max<int64_t>(1, (rows * columns / 8 + kThreads - 1) / kThreads);
    const auto kernel = fp8_current_scale_of_source_kernel<Source, Arguments>;
    const auto blocks = static_cast<unsigned>(resident_blocks(kernel, kThreads, needed));
    kernel<<<blocks, kThreads, 0, stream>>>(work, rows, columns, scale);
    return cudaGetLastError();
}

}  // namespace te_graph::fp8
