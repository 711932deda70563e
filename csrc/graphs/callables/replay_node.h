// The autograd node of forward replays.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <vector>

#include "graphs/callables/callable.h"
#include "graphs/callables/pending_backward.h"

namespace te_graph::graphs {

// Compiled autograd would trace what a node does.
[[noreturn]] void refuse_compiled_autograd(const std::string& label);

// Holds the slots until the backward has run without retain_graph, or until it can no longer run.
//
// A node begins with one pending backward. In a chain it takes over the node below it as soon as nothing else refers to
// that one, so a backward through many layers is one node for torch's engine, and one launch. Its edges are those of
// its pending backwards, last forward first, without the edges between them.
class ReplayNode final : public torch::autograd::Node {
public:
    explicit ReplayNode(PendingBackward pending) { pending_.push_back(std::move(pending)); }

    torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
    void release_variables() override;
    std::string name() const override { return "GraphedBackward(" + label_ + ")"; }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(label_); }
    void set_label(const std::string& label) { label_ = label; }

    // How many gradients of `leaf` the running backward leads to: one for each pending backward of a callable that has
    // it as a parameter, and one for edges to its AccumulateGrad node.
    static size_t count_gradients_of(const at::Tensor& leaf);

    // Takes over the node that its linked inputs come from, if nothing can tell the difference.
    void absorb_predecessor();

    PendingBackward& pending() { return pending_.front(); }

private:
    void find_shared_inputs();
    size_t count_pending_with(const at::Tensor& leaf) const;
    bool can_absorb(const ReplayNode& below, size_t links) const;

    std::string label_;
    std::vector<PendingBackward> pending_;  // last forward first
};

// Between a ReplayNode and one of several results. Autograd runs it, and the hooks on the result with it, only where
// that result gets a gradient.
class ResultNode final : public torch::autograd::Node {
public:
    explicit ResultNode(std::string label) : label_(std::move(label)) {}
    torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override { return std::move(grads); }
    std::string name() const override { return "GraphedResult(" + label_ + ")"; }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(label_); }

private:
    const std::string label_;
};

}  // namespace te_graph::graphs
