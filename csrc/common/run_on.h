// The CPU loop or the kernel launch of an op, by device.
#pragma once

#include <c10/core/Device.h>

#include "common/cpu_only.h"

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace te_graph {

// on_cpu() for tensors on the CPU; launch(stream) for a GPU, on its current stream.
template <typename OnCpu, typename Launch>
void run_on(at::Device device, const OnCpu& on_cpu, [[maybe_unused]] const Launch& launch) {
    if (device.is_cpu()) return on_cpu();
#ifdef TE_GRAPH_CUDA
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(launch(c10::cuda::getCurrentCUDAStream()));
#else
    check_is_built_for(device);
#endif
}

#ifdef TE_GRAPH_CUDA
#define TE_GRAPH_LAUNCH(call) [&](cudaStream_t stream) { return call; }
#else
#define TE_GRAPH_LAUNCH(call) 0
#endif
// NAME_cpu(arguments) for tensors on the CPU, launch_NAME(arguments, stream) for a GPU.
#define TE_GRAPH_RUN(device, name, ...) \
    run_on(                             \
        device, [&] { name##_cpu(__VA_ARGS__); }, TE_GRAPH_LAUNCH(launch_##name(__VA_ARGS__, stream)))

}  // namespace te_graph
