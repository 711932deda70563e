#include "graph/replay_node.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

namespace te_graph::graph {

torch::autograd::variable_list ReplayNode::apply(torch::autograd::variable_list&& grads) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!flights_.empty(), "te_graph: backward of ", label_,
                " a second time: its slot has been given back. Pass retain_graph=True to the first backward.");
    TORCH_CHECK(!c10::GradMode::is_enabled(), "te_graph: ", label_,
                " does not support double backward (create_graph=True): a captured backward has no derivative. "
                "Run it eagerly for this.");
    return GraphedCallable::backward(flights_, std::move(grads));
}

void ReplayNode::release_variables() {
    const std::lock_guard lock(mutex_);
    flights_.clear();
}

// Nobody but this node may refer to `below`, whose results then are gone and cannot get a gradient from elsewhere. No
// node was made between the two, so that the engine's order among all other nodes stays what it is. Neither has
// parameters that autograd serves: their hooks run after the layer's backward and before the next one's, as all-reduces
// that overlap need it. `links`: edges from here to there, all from linked inputs.
bool ReplayNode::can_absorb(const ReplayNode& below, size_t links) const {
    const auto owners = static_cast<size_t>(next_edges().front().function.use_count());
    const bool is_hooked = !below.pre_hooks().empty() || !below.post_hooks().empty() ||
                           !const_cast<ReplayNode&>(below).tensor_pre_hooks().empty() ||
                           !const_cast<ReplayNode&>(below).retains_grad_hooks().empty();
    return owners == links && !is_hooked && below.sequence_nr() + 1 == sequence_nr() && !below.flights_.empty() &&
           flights_.back().autograd_parameters.empty() && below.flights_.front().autograd_parameters.empty() &&
           flights_.back().callable->continues(flights_.back(), below.flights_.front());
}

void ReplayNode::absorb_predecessor() {
    const std::lock_guard lock(mutex_);
    if (flights_.size() != 1 || next_edges().empty()) return;
    // A node of a chain has its linked inputs first.
    auto* const below = dynamic_cast<ReplayNode*>(next_edges().front().function.get());
    if (!below) return;
    const auto is_link = [below](const auto& edge) { return edge.function.get() == below; };
    const size_t links = std::count_if(next_edges().begin(), next_edges().end(), is_link);
    Flight& flight = flights_.front();
    const size_t linked = std::count_if(flight.input_edges.begin(), flight.input_edges.end(),
                                        [&](const InputEdge& edge) { return flight.callable->is_linked(edge.input); });
    if (links != linked || !can_absorb(*below, links)) return;

    torch::autograd::edge_list edges(next_edges().begin() + links, next_edges().end());
    std::move(below->next_edges().begin(), below->next_edges().end(), std::back_inserter(edges));
    below->next_edges().clear();
    flight.input_edges.erase(flight.input_edges.begin(), flight.input_edges.begin() + links);
    std::move(below->flights_.begin(), below->flights_.end(), std::back_inserter(flights_));
    below->flights_.clear();
    next_edges().swap(edges);  // `below` goes with the old edges
}

}  // namespace te_graph::graph
