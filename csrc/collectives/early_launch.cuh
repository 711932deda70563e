// Kernels that are launched before their predecessor on the stream has ended (programmatic dependent launch), so that
// nobody waits for the time that a launch takes: 0.4 us of the 2.7 that the smallest collectives took without.
#pragma once

#include "collectives/peers.h"

namespace te_graph::collectives {

// Early if job.starts_early. The kernel calls await_predecessor() before it touches memory.
inline cudaError_t launch_early(void (*kernel)(Job, Peers), int threads, const Peers& peers, const Job& job,
                                cudaStream_t stream) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(job.blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = job.starts_early ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, job, peers);
}

// Waits until the predecessor has ended and what it wrote is there. `prepared`: what shall be computed until then,
// or-ed, and never 0: the assembler would otherwise wait first.
__device__ __forceinline__ void await_predecessor(uint64_t prepared) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u64 p, %0, 0;\n"
        "@p griddepcontrol.wait;\n"
        "}\n" ::"l"(prepared)
        : "memory");
#endif
}

// Once all blocks have called it or have ended, the successor's blocks take places that are free.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace te_graph::collectives
