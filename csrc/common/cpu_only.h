// What a build without CUDA code says to tensors on a GPU.
#pragma once

#include <c10/core/Device.h>
#include <torch/library.h>

namespace te_graph {

#ifdef TE_GRAPH_CUDA
inline void check_is_built_for(at::Device) {}
#else

// Raises unless device is the CPU. The sentence is that of te_graph/_build.py: why there is no CUDA code.
void check_is_built_for(at::Device device);

// The CUDA kernel of all ops.
torch::CppFunction cpu_only();

#endif

}  // namespace te_graph
