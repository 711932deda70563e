// The uses of an input inside a callable, each with a gradient of its own.
//
// Autograd adds the gradients of all uses of a tensor in the order in which they come. A replay has one sum for those
// inside, which rounds otherwise where a gradient from outside came first. So their gradients are kept apart as well,
// and given out one by one where others use the tensor, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace te_graph::graphs {

// Gives each edge of the autograd graph below `outputs` that leads to `leaf` a leaf of its own over the same memory.
// Returns those in the order in which autograd would have added their gradients; nothing is changed, and nothing
// returned, where there are fewer than two, or one whose edges cannot be exchanged.
std::vector<at::Tensor> split_uses(const std::vector<at::Tensor>& outputs, const at::Tensor& leaf);

}  // namespace te_graph::graphs
