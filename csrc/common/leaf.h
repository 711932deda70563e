// What autograd would run for leaves.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_hook.h>

#include <cstring>
#include <typeinfo>

#include "common/autograd_meta.h"
#include "common/grad_view.h"

namespace te_graph {

// True unless `hook` runs nothing: a dictionary of Python's that is empty, before the first or after the last hook was
// in it, or te_graph's own. Its class is not exported, so only the name can be compared.
inline bool runs_something(const torch::autograd::FunctionPreHook& hook) {
    const auto& type = typeid(hook);
    if (type == typeid(GradViewHook)) return false;
    if (std::strcmp(type.name(), "N5torch8autograd23PyFunctionTensorPreHookE") != 0) return true;
    return PyDict_GET_SIZE(static_cast<const torch::autograd::PyFunctionTensorPreHook&>(hook).dict) > 0;
}

// True when something would run if autograd accumulated into `leaf` [...]: tensor hooks, post-accumulate-grad hooks, or
// hooks on its AccumulateGrad node, where DistributedDataParallel has its own (Python cannot see those).
inline bool has_gradient_hooks(const torch::autograd::AutogradMeta& leaf) {
    for (const auto& hook : leaf.hooks_) {
        if (runs_something(*hook)) return true;
    }
    if (leaf.post_acc_grad_hooks_) return true;
    if (leaf.grad_accumulator_.expired()) return false;
    const auto accumulator = leaf.grad_accumulator_.lock();
    return accumulator && (!accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty());
}
inline bool has_gradient_hooks(const at::Tensor& leaf) {
    const torch::autograd::AutogradMeta* const meta = autograd_meta_of(leaf);
    return meta && has_gradient_hooks(*meta);
}

}  // namespace te_graph
