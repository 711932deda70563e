// The autograd node of one forward replay.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <vector>

#include "graph/callable.h"

namespace te_graph::graph {

// An input that the backward reads where the predecessor left it: it must not be modified in between.
struct LinkedInput {
    LinkedInput(size_t number, const at::Tensor& tensor)
        : input(number),
          version(tensor.unsafeGetTensorImpl()->version_counter()),
          version_at_forward(version.current_version()) {}
    size_t input;
    c10::VariableVersion version;
    uint32_t version_at_forward;
};

// Holds the slot until the backward has run without retain_graph, or until nobody can run it any more.
class ReplayNode final : public torch::autograd::Node {
public:
    ReplayNode(std::shared_ptr<GraphedCallable> callable, SlotLease lease) : callable_(std::move(callable)) {
        lease_.emplace(std::move(lease));
    }

    torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
    void release_variables() override;
    std::string name() const override { return "GraphedBackward(" + callable_->name() + ")"; }

    int slot() const { return lease_->slot(); }

    // Keeps a slot of the predecessor busy as well: its results are read in place.
    void hold(SlotLease lease) { predecessor_lease_.emplace(std::move(lease)); }

    std::vector<at::Tensor> externals;                  // [guard's tensors], as found by the forward
    std::vector<uint32_t> external_versions;            // [guard's tensors] after the forward
    std::vector<c10::VariableVersion> output_versions;  // [outputs]
    std::vector<LinkedInput> linked_inputs;             // those that autograd saved
    std::vector<bool> through_autograd;                 // [parameters]: has an edge of this node
    std::vector<int> input_edges;                       // inputs that have an edge, in order of next_edges
    std::vector<bool> leaf_inputs;                      // [input_edges]: the edge leads to a leaf

private:
    std::shared_ptr<GraphedCallable> callable_;
    std::optional<SlotLease> lease_;
    std::optional<SlotLease> predecessor_lease_;
};

}  // namespace te_graph::graph
