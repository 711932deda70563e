#include "graph/replay_node.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <typeinfo>

#include "graph/hooks.h"

namespace te_graph::graph {

namespace {

// Comes before all hooks on results, also where the node itself is not run.
struct ObserverCheck final : torch::autograd::FunctionPreHook {
    explicit ObserverCheck(const ReplayNode& checked) : node(checked) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
        node.check_observers();
        return grads;
    }
    const ReplayNode& node;
};

// The result that a hook on a result observes, or nothing when it does not tell.
std::optional<size_t> observed_by(const torch::autograd::FunctionPreHook& hook) {
    // Known by its name: torch does not export the type.
    const bool is_python = std::strstr(typeid(hook).name(), "PyFunctionTensorPreHook") != nullptr;
    if (!is_python) return std::nullopt;
    return static_cast<const torch::autograd::PyFunctionTensorPreHook&>(hook).value_idx;
}

bool is_batched(const at::Tensor& grad) {
    const at::DispatchKeySet batched({at::DispatchKey::Batched, at::DispatchKey::FuncTorchBatched});
    return grad.defined() && grad.key_set().has_any(batched);
}

}  // namespace

void ReplayNode::watch_observers(const std::vector<bool>& inner_outputs) {
    if (std::find(inner_outputs.begin(), inner_outputs.end(), true) == inner_outputs.end()) return;
    inner_outputs_ = inner_outputs;
    add_tensor_pre_hook(std::make_unique<ObserverCheck>(*this));
}

void ReplayNode::check_observers() const {
    const auto check = [&](std::optional<size_t> output) {
        for (size_t i = 0; i < inner_outputs_.size(); ++i) {
            TORCH_CHECK(
                !inner_outputs_[i] || (output && *output != i), label_, ": result ", i,
                " has a hook, retains its gradient or is an input of torch.autograd.grad, and another result is "
                "computed from it inside the graph, where nothing sees that part of its gradient: let the "
                "callable return a clone of it");
        }
    };
    auto& node = const_cast<ReplayNode&>(*this);
    for (const auto& hook : node.tensor_pre_hooks()) {
        if (!dynamic_cast<const ObserverCheck*>(hook.get())) check(observed_by(*hook));
    }
    for (const auto& [output, hook] : node.retains_grad_hooks()) check(output);
    const auto* const exec_info = torch::autograd::get_current_graph_task_exec_info();
    if (!exec_info) return;
    const auto asked = exec_info->find(&node);
    if (asked == exec_info->end() || !asked->second.captures_) return;
    for (const auto& capture : *asked->second.captures_) check(capture.input_idx_);
}

torch::autograd::variable_list ReplayNode::apply(torch::autograd::variable_list&& grads) {
    BackwardResults results;
    {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK(!flights_.empty(), "te_graph: backward of ", label_,
                    " a second time: its slot has been given back. Pass retain_graph=True to the first backward.");
        TORCH_CHECK(!c10::GradMode::is_enabled(), "te_graph: ", label_,
                    " does not support double backward (create_graph=True): a captured backward has no derivative. "
                    "Run it eagerly for this.");
        TORCH_CHECK(std::none_of(grads.begin(), grads.end(), is_batched), "te_graph: ", label_,
                    " does not support a batch of gradients at once (is_grads_batched=True, vectorize=True): a "
                    "captured backward has one shape. Pass them one by one.");
        find_shared_inputs();
        results = GraphedCallable::backward(flights_, std::move(grads));
    }
    // Without the lock: what they do may come back to this node.
    for (auto& [parameter, gradient] : results.hooked) accumulate_with_hooks(parameter, std::move(gradient));
    return std::move(results.gradients);
}

void ReplayNode::release_variables() {
    const std::lock_guard lock(mutex_);
    for (const Flight& flight : flights_) {
        if (flight.owes_gradients) flight.callable->note_lost_gradients();
    }
    flights_.clear();
}

namespace {

// Whether the tensor that `edge` was made for holds `maker`: not a leaf, and not one that has been changed in place.
bool is_held_by_input(const InputEdge& edge, const NodePointer& maker) {
    const auto input = edge.tensor.lock();
    const auto* const meta = input ? static_cast<torch::autograd::AutogradMeta*>(input->autograd_meta()) : nullptr;
    return meta && meta->grad_fn_ == maker;
}

}  // namespace

// Who else holds the node that made an input may have used the input, too; more than that cannot be known. The input
// itself holds it as long as it lives and is what it was.
void ReplayNode::find_shared_inputs() {
    size_t next = 0;
    for (Flight& flight : flights_) {
        for (InputEdge& edge : flight.input_edges) {
            const auto& maker = next_edge(next).function;
            next += edge.uses;
            if (edge.uses < 2 || !maker) continue;
            const auto is_ours = [&](const auto& other) { return other.function == maker; };
            const auto ours = std::count_if(next_edges().begin(), next_edges().end(), is_ours);
            edge.is_shared = maker.use_count() > ours + is_held_by_input(edge, maker);
        }
        next += flight.autograd_parameters.size();
    }
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
    // A backward that runs it on another thread may wait for the GIL, which this thread has.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || flights_.size() != 1 || next_edges().empty()) return;
    // A node of a chain has its linked inputs first.
    auto* const below = dynamic_cast<ReplayNode*>(next_edges().front().function.get());
    if (!below) return;
    const auto is_link = [below](const auto& edge) { return edge.function.get() == below; };
    const size_t links = std::count_if(next_edges().begin(), next_edges().end(), is_link);
    Flight& flight = flights_.front();
    size_t linked_inputs = 0, linked_edges = 0;
    for (const InputEdge& edge : flight.input_edges) {
        if (!flight.callable->is_linked(edge)) continue;
        ++linked_inputs;
        linked_edges += edge.uses;
    }
    if (links != linked_edges || !can_absorb(*below, links)) return;

    torch::autograd::edge_list edges(next_edges().begin() + links, next_edges().end());
    std::move(below->next_edges().begin(), below->next_edges().end(), std::back_inserter(edges));
    below->next_edges().clear();
    flight.input_edges.erase(flight.input_edges.begin(), flight.input_edges.begin() + linked_inputs);
    std::move(below->flights_.begin(), below->flights_.end(), std::back_inserter(flights_));
    below->flights_.clear();
    next_edges().swap(edges);  // `below` goes with the old edges
}

}  // namespace te_graph::graph
