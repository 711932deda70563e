#include "graphs/callables/replay_node.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>

#include "graphs/hooks.h"

namespace te_graph::graphs {

namespace {

bool is_batched(const at::Tensor& grad) {
    const at::DispatchKeySet batched({at::DispatchKey::Batched, at::DispatchKey::FuncTorchBatched});
    return grad.defined() && grad.key_set().has_any(batched);
}

}  // namespace

void refuse_compiled_autograd(const std::string& label) {
    TORCH_CHECK(false, label,
                ": does not support compiled autograd, which traces each backward: leave it off "
                "(torch._dynamo.config.compiled_autograd) where graphed callables train");
}

torch::autograd::variable_list ReplayNode::apply(torch::autograd::variable_list&& grads) {
    BackwardResults results;
    {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK(
            !pending_.empty(), label_,
            ": backward a second time: its slot has been released. Pass retain_graph=True to the first backward.");
        TORCH_CHECK(!c10::GradMode::is_enabled(), label_,
                    ": does not support double backward (create_graph=True): a captured backward has no derivative. "
                    "Run it eagerly for this.");
        TORCH_CHECK(std::none_of(grads.begin(), grads.end(), is_batched), label_,
                    ": does not support a batch of gradients at once (is_grads_batched=True, vectorize=True): a "
                    "captured backward has one shape. Pass them one by one.");
        find_shared_inputs();
        results = GraphedCallable::backward(pending_, std::move(grads));
    }
    // Without the lock: what they do may come back to this node.
    for (auto& [parameter, gradient] : results.hooked) accumulate_with_hooks(parameter, std::move(gradient));
    return std::move(results.gradients);
}

void ReplayNode::release_variables() {
    const std::lock_guard lock(mutex_);
    for (const PendingBackward& pending : pending_) {
        if (pending.owes_gradients) pending.callable->note_lost_gradients();
    }
    pending_.clear();
}

namespace {

// Whether the tensor that `edge` was made for holds `maker`: not a leaf, and not one that has been changed in place.
bool is_held_by_input(const InputEdge& edge, const NodePointer& maker) {
    const auto input = edge.tensor.lock();
    const auto* const meta = input ? static_cast<torch::autograd::AutogradMeta*>(input->autograd_meta()) : nullptr;
    return meta && meta->grad_fn_ == maker;
}

}  // namespace

// Another holder of the node that made an input may have used the input, too; more than that cannot be known. The input
// itself holds it as long as it lives and is what it was.
void ReplayNode::find_shared_inputs() {
    size_t next = 0;
    for (PendingBackward& pending : pending_) {
        for (InputEdge& edge : pending.input_edges) {
            const auto& maker = next_edge(next).function;
            next += edge.uses;
            if (edge.uses < 2 || !maker) continue;
            const auto is_ours = [&](const auto& other) { return other.function == maker; };
            const auto ours = std::count_if(next_edges().begin(), next_edges().end(), is_ours);
            edge.is_shared = maker.use_count() > ours + is_held_by_input(edge, maker);
        }
        next += pending.autograd_parameters.size();
    }
}

size_t ReplayNode::count_pending_with(const at::Tensor& leaf) const {
    return std::count_if(pending_.begin(), pending_.end(), [&](const PendingBackward& pending) {
        return pending.callable->has_parameter(pending, leaf);
    });
}

size_t ReplayNode::count_gradients_of(const at::Tensor& leaf) {
    const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    const auto current = torch::autograd::get_current_node();
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
    // The engine does not list the node that it begins with.
    const auto* const running = dynamic_cast<const ReplayNode*>(current.get());
    size_t count = running ? running->count_pending_with(leaf) : 0;
    if (!nodes) return count;
    if (accumulator) count += nodes->count(accumulator.get());
    for (torch::autograd::Node* const node : *nodes) {
        auto* const other = dynamic_cast<ReplayNode*>(node);
        if (!other || other == running) continue;
        // One that another thread runs now, and that waits for a lock of this one's, counts as if it had the leaf.
        const std::unique_lock lock(other->mutex_, std::try_to_lock);
        count += lock ? other->count_pending_with(leaf) : 1;
    }
    return count;
}

// Only this node may refer to `below`, whose results then are gone and cannot get a gradient from elsewhere. No
// node was made between the two, so that the engine's order among all other nodes stays what it is. Neither has
// parameters that autograd serves: their hooks run after the layer's backward and before the next one's, as all-reduces
// that overlap need it. `links`: edges from here to there, all from linked inputs.
bool ReplayNode::can_absorb(const ReplayNode& below, size_t links) const {
    const auto owners = static_cast<size_t>(next_edges().front().function.use_count());
    const bool is_hooked = !below.pre_hooks().empty() || !below.post_hooks().empty() ||
                           !const_cast<ReplayNode&>(below).tensor_pre_hooks().empty() ||
                           !const_cast<ReplayNode&>(below).retains_grad_hooks().empty();
    return owners == links && !is_hooked && below.sequence_nr() + 1 == sequence_nr() && !below.pending_.empty() &&
           pending_.back().autograd_parameters.empty() && below.pending_.front().autograd_parameters.empty() &&
           pending_.back().callable->continues(pending_.back(), below.pending_.front());
}

void ReplayNode::absorb_predecessor() {
    // A backward that runs it on another thread may wait for the GIL, which this thread has.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || pending_.size() != 1 || next_edges().empty()) return;
    // A node of a chain has its linked inputs first.
    auto* const below = dynamic_cast<ReplayNode*>(next_edges().front().function.get());
    if (!below) return;
    const auto is_link = [below](const auto& edge) { return edge.function.get() == below; };
    const size_t links = std::count_if(next_edges().begin(), next_edges().end(), is_link);
    PendingBackward& pending = pending_.front();
    size_t linked_inputs = 0, linked_edges = 0;
    for (const InputEdge& edge : pending.input_edges) {
        if (!pending.callable->is_linked(edge)) continue;
        ++linked_inputs;
        linked_edges += edge.uses;
    }
    if (links != linked_edges || !can_absorb(*below, links)) return;

    torch::autograd::edge_list edges(next_edges().begin() + links, next_edges().end());
    std::move(below->next_edges().begin(), below->next_edges().end(), std::back_inserter(edges));
    below->next_edges().clear();
    pending.input_edges.erase(pending.input_edges.begin(), pending.input_edges.begin() + linked_inputs);
    std::move(below->pending_.begin(), below->pending_.end(), std::back_inserter(pending_));
    below->pending_.clear();
    next_edges().swap(edges);  // `below` goes with the old edges
}

}  // namespace te_graph::graphs
