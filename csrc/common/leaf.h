// What autograd would run for leaves.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "common/autograd_meta.h"

namespace te_graph {

// True when something would run if autograd accumulated into `leaf` [...]: tensor hooks, post-accumulate-grad hooks, or
// hooks on its AccumulateGrad node, where DistributedDataParallel has its own (Python cannot see those).
inline bool has_gradient_hooks(const torch::autograd::AutogradMeta& leaf) {
    if (!leaf.hooks_.empty() || leaf.post_acc_grad_hooks_) return true;
    if (leaf.grad_accumulator_.expired()) return false;
    const auto accumulator = leaf.grad_accumulator_.lock();
    return accumulator && (!accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty());
}
inline bool has_gradient_hooks(const at::Tensor& leaf) {
    const torch::autograd::AutogradMeta* const meta = autograd_meta_of(leaf);
    return meta && has_gradient_hooks(*meta);
}

}  // namespace te_graph
