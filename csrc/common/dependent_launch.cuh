// Programmatic dependent launch: blocks of a kernel come onto the GPU while the kernel before it ends, and wait for its
// end before they touch memory. In chains of short kernels that hides most of what a launch takes.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace te_graph {

// First of all in a kernel that launch_dependent() launches. The blocks of the next one may come from here on.
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether what kKernel was compiled for has clusters and dependent launches: the GPU alone does not say, since PTX for
// an older one may have been compiled for it. The driver is asked once for each device.
template <auto kKernel>
cudaError_t find_is_for_hopper(bool& is_for_hopper) {
    enum Answer : uint8_t { kNotAsked, kNo, kYes };
    constexpr int kMostDevices = 128;  // of a process, more than torch has
    static std::array<std::atomic<Answer>, kMostDevices> answers{};
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (answers[device] == kNotAsked) {
        cudaFuncAttributes attributes{};
        if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kKernel); error != cudaSuccess) return error;
        answers[device] = attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90 ? kYes : kNo;
    }
    is_for_hopper = answers[device] == kYes;
    return cudaSuccess;
}

// Launches kKernel, which calls wait_for_kernel_before(); in clusters of `cluster` blocks along x where that is above
// 1, which the kernel must be compiled for.
template <auto kKernel, typename... Arguments>
cudaError_t launch_dependent(dim3 grid, unsigned threads, unsigned cluster, cudaStream_t stream,
                             const Arguments&... arguments) {
    bool is_for_hopper = false;
    if (const cudaError_t error = find_is_for_hopper<kKernel>(is_for_hopper); error != cudaSuccess) return error;
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
    return cudaLaunchKernelEx(&config, kKernel, arguments...);
}

}  // namespace te_graph
