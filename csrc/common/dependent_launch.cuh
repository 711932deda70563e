// Programmatic dependent launch: blocks of a kernel come onto the GPU while the kernel before it ends, and wait for its
// end before they touch memory. In chains of short kernels that hides most of what a launch takes.
#pragma once

#include <cuda_runtime.h>

namespace te_graph {

// First of all in a kernel that launch_dependent() launches. The blocks of the next one may come from here on.
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether what `kernel` was compiled for has clusters and dependent launches: the GPU alone does not say, since PTX for
// an older one may have been compiled for it.
template <typename Kernel>
cudaError_t find_is_for_hopper(Kernel kernel, bool& is_for_hopper) {
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    is_for_hopper = attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
    return error;
}

// Launches `kernel`, which calls wait_for_kernel_before(); in clusters of `cluster` blocks along x where that is above 1,
// which the kernel must be compiled for.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, unsigned threads, unsigned cluster,
                             cudaStream_t stream, const Arguments&... arguments) {
    bool is_for_hopper = false;
    if (const cudaError_t error = find_is_for_hopper(kernel, is_for_hopper); error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (is_for_hopper) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {cluster, 1, 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace te_graph
