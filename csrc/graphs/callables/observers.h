// What observes a gradient of which a part stays inside a graph: hooks on tensors, retain_grad(), torch.autograd.grad.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <string>
#include <vector>

namespace te_graph::graphs {

// A result from which another one is computed gets part of its gradient inside the graph, where no hook sees or changes
// it. `inner` says of each output of `node`, which made the results of the callable `label`, whether it is one; a
// backward raises if one of these is observed.
void refuse_observers_of_results(torch::autograd::Node& node, const std::vector<bool>& inner, const std::string& label);

// The same of an argument that the callable has changed in place, `tensor` [...], and computed a result from. A hook
// that was put on it before sees the gradient of what it was then, and is not refused. `name` is what messages call it.
void refuse_observers_of_argument(const at::Tensor& tensor, const std::string& name);

}  // namespace te_graph::graphs
