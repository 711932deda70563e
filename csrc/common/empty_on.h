// New tensors without the dispatcher's part of at::empty, which is a third of its time. For what an op allocates:
// dispatch modes do not see where it comes from.
#pragma once

#include <ATen/ops/empty.h>

#ifdef TE_GRAPH_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace te_graph {

// [sizes], contiguous, not initialised, with torch's fill_uninitialized_memory neither: every element is to be written.
inline at::Tensor empty_on(at::Device device, at::IntArrayRef sizes, at::ScalarType dtype) {
#ifdef TE_GRAPH_CUDA
    if (device.is_cuda()) return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
#endif
    return at::empty(sizes, at::TensorOptions().device(device).dtype(dtype));
}

}  // namespace te_graph
