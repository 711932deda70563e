#include "graph/hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace te_graph::graph {

namespace impl = torch::autograd::impl;

bool has_gradient_hooks(const at::Tensor& leaf) {
    const auto* const meta = impl::get_autograd_meta(leaf);
    if (!meta) return false;
    if (!meta->hooks_.empty() || meta->post_acc_grad_hooks_) return true;
    const auto accumulator = meta->grad_accumulator_.lock();
    return accumulator && (!accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty());
}

HookSuspension::HookSuspension(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)), hooks_(leaves_.size()) {
    for (size_t i = 0; i < leaves_.size(); ++i) {
        if (auto* const meta = impl::get_autograd_meta(leaves_[i])) std::swap(meta->hooks_, hooks_[i]);
    }
}

void HookSuspension::restore() {
    for (size_t i = 0; i < leaves_.size(); ++i) {
        if (auto* const meta = impl::get_autograd_meta(leaves_[i])) std::swap(meta->hooks_, hooks_[i]);
    }
    leaves_.clear();
}

}  // namespace te_graph::graph
