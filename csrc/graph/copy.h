// Copies into static memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace te_graph::graph {

// destination.copy_(source) for tensors of equal shape, dtype and device: one memcpy where the layouts agree.
void copy_into(const at::Tensor& destination, const at::Tensor& source);

}  // namespace te_graph::graph
