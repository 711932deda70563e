#include "graph/hooks.h"

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

LeafIsolation::LeafIsolation(std::vector<at::Tensor> leaves, bool with_accumulators)
    : with_accumulators_(with_accumulators), leaves_(std::move(leaves)), kept_(leaves_.size()) {
    exchange();
}

void LeafIsolation::restore() {
    exchange();
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

}  // namespace te_graph::graph
