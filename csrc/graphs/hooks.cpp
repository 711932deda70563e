#include "graphs/hooks.h"

#include <torch/csrc/autograd/variable.h>

namespace te_graph::graphs {

namespace impl = torch::autograd::impl;

namespace {

void run(const NodePointer& accumulator, torch::autograd::variable_list grads) {
    for (const auto& hook : accumulator->tensor_pre_hooks()) grads = (*hook)(grads);
    for (const auto& hook : accumulator->pre_hooks()) grads = (*hook)(grads);
    // AccumulateGrad runs the post-accumulate-grad hooks itself.
    const bool is_seen = !accumulator->post_hooks().empty();
    const torch::autograd::variable_list seen = is_seen ? grads : torch::autograd::variable_list{};
    const torch::autograd::variable_list results = (*accumulator)(std::move(grads));
    for (const auto& hook : accumulator->post_hooks()) (*hook)(results, seen);
}

}  // namespace

void accumulate_with_hooks(const at::Tensor& leaf, at::Tensor grad) {
    torch::autograd::variable_list grads{std::move(grad)};
    if (const auto known = impl::try_get_grad_accumulator(leaf)) {
        run(known, std::move(grads));
    } else if (leaf.requires_grad()) {
        run(impl::grad_accumulator(leaf), std::move(grads));
    } else {  // frozen: no node can be made for it, but its hooks run
        for (const auto& hook : impl::hooks(leaf)) grads = (*hook)(grads);
        if (const auto& hook = impl::post_acc_grad_hooks(leaf)) (*hook)(leaf);
    }
}

LeafIsolation::LeafIsolation(std::vector<at::Tensor> leaves, bool with_accumulators)
    : with_accumulators_(with_accumulators), leaves_(std::move(leaves)), kept_(leaves_.size()) {
    exchange();
}

void LeafIsolation::restore() {
    exchange();
    for (size_t i = 0; i < leaves_.size(); ++i) {
        // Those that came meanwhile, from another thread: what is captured puts none there.
        auto* const meta = impl::get_autograd_meta(leaves_[i]);
        for (auto& hook : kept_[i].hooks) meta->hooks_.push_back(std::move(hook));
    }
    leaves_.clear();
}

void LeafIsolation::exchange() {
    for (size_t i = 0; i < leaves_.size(); ++i) {
        if (auto* const meta = impl::get_autograd_meta(leaves_[i])) {
            std::swap(meta->hooks_, kept_[i].hooks);
            if (with_accumulators_) std::swap(meta->grad_accumulator_, kept_[i].accumulator);
        }
    }
}

}  // namespace te_graph::graphs
