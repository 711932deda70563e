// Programmatic dependent launch: a kernel is launched before its predecessor on the stream has ended, which hides the
// launch latency (0.4 us of the 2.7 that the smallest collectives took without).
#pragma once

#include "collectives/peers.h"

namespace te_graph::collectives {

// Early if args.starts_early. The kernel calls await_predecessor() before it accesses memory.
inline cudaError_t launch_early(void (*kernel)(LaunchArgs, Peers), int threads, const Peers& peers,
                                const LaunchArgs& args, cudaStream_t stream) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(args.blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = args.starts_early ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args, peers);
}

// Waits until the predecessor has ended and its writes are visible. `prepared`: the or of all values to be computed
// before the wait, never 0; without this dependency the assembler would schedule the wait first.
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

// Once all blocks have called it or have exited, blocks of the successor may be scheduled on free multiprocessors.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace te_graph::collectives
