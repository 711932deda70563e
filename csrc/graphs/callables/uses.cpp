#include "graphs/callables/uses.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <tuple>
#include <unordered_set>

namespace te_graph::graphs {

namespace impl = torch::autograd::impl;
using torch::autograd::Node;

std::vector<at::Tensor> split_uses(const std::vector<at::Tensor>& outputs, const at::Tensor& leaf) {
    const auto accumulator = impl::try_get_grad_accumulator(leaf);
    if (!accumulator) return {};
    std::vector<Node*> stack;
    std::unordered_set<Node*> seen;
    const auto visit = [&](Node* node) {
        if (node && seen.insert(node).second) stack.push_back(node);
    };
    for (const at::Tensor& output : outputs) visit(output.grad_fn().get());
    std::vector<std::pair<Node*, size_t>> uses;
    while (!stack.empty()) {
        Node* const node = stack.back();
        stack.pop_back();
        for (size_t i = 0; i < node->num_outputs(); ++i) {
            Node* const next = node->next_edge(i).function.get();
            if (next == accumulator.get()) uses.emplace_back(node, i);
            visit(next);
        }
    }
    // A CopySlices has a second list of its edges, inside.
    const auto is_closed = [](const auto& use) { return use.first->name().find("CopySlices") != std::string::npos; };
    if (uses.size() < 2 || std::any_of(uses.begin(), uses.end(), is_closed)) return {};
    // Nodes run in the opposite order of their making, which their numbers tell.
    std::sort(uses.begin(), uses.end(), [](const auto& a, const auto& b) {
        return std::make_tuple(~a.first->sequence_nr(), a.second) < std::make_tuple(~b.first->sequence_nr(), b.second);
    });
    std::vector<at::Tensor> leaves;
    for (const auto& [node, i] : uses) {
        leaves.push_back(leaf.detach().requires_grad_());
        node->next_edges()[i] = impl::gradient_edge(leaves.back());
    }
    return leaves;
}

}  // namespace te_graph::graphs
