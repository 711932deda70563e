// The backward of one flight, or of several that follow each other in a chain.
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "graph/callable.h"
#include "graph/copy.h"

namespace te_graph::graph {

using torch::autograd::variable_list;

namespace {

bool is_same(const std::vector<std::weak_ptr<Graph>>& known, const std::vector<std::shared_ptr<Graph>>& parts) {
    const auto equal = [](const std::weak_ptr<Graph>& a, const std::shared_ptr<Graph>& b) { return a.lock() == b; };
    return std::equal(known.begin(), known.end(), parts.begin(), parts.end(), equal);
}

}  // namespace

bool GraphedCallable::continues(const Flight& upper, const Flight& lower) const {
    const GraphedCallable& below = *lower.callable;
    if (predecessor_ != below.pool_ || upper.lease.slot() != lower.lease.slot()) return false;
    const Slot& slot = slot_of(upper);
    for (const InputEdge& edge : upper.input_edges) {
        if (!inputs_[edge.input].is_linked) continue;
        const at::Tensor& gradient = slot.grad_inputs.tensors()[edge.input];
        const auto& stagings = below.slot_of(lower).grad_outputs;
        const bool is_read = std::any_of(stagings.begin(), stagings.end(), [&](const auto& staging) {
            return staging->is_lent && gradient.numel() > 0 && staging->holds(gradient);
        });
        if (!is_read) return false;
    }
    return true;
}

// Which results in `slot` get a gradient from the backward of `upper`, whose own results in `got_upper` got one.
GraphedCallable::Bits GraphedCallable::grads_from(const Flight& upper, const Bits& got_upper, const Slot& slot) const {
    const GraphedCallable& above = *upper.callable;
    const auto& written = above.slot_of(upper).grad_inputs.tensors();
    Bits got(slot.grad_outputs.size());
    for (size_t result = 0; result < got.size(); ++result) {
        for (size_t i = 0; i < written.size(); ++i) {
            const auto& depends_on = above.inputs_[i].depends_on;
            if (!above.inputs_[i].is_linked || !written[i].defined() || !slot.grad_outputs[result]->holds(written[i])) {
                continue;
            }
            for (size_t k = 0; k < depends_on.size(); ++k) got[result] = got[result] || (depends_on[k] && got_upper[k]);
        }
    }
    return got;
}

// True when nothing of the backward's own memory is needed once the graph has run: then another one may follow at once.
bool GraphedCallable::leaves_nothing_behind(const Flight& flight) const {
    const auto stays = [](const Pending& pending) {
        return pending.action == GradientAction::kAddEagerly || pending.action == GradientAction::kReturn ||
               pending.action == GradientAction::kCallHooks;
    };
    const Slot& slot = slot_of(flight);
    const auto& pending = slot.pending;
    return flight.input_edges.empty() &&
           (slot.repetition.happens || std::none_of(pending.begin(), pending.end(), stays));
}

// The graph of all `flights`, or null when they have to be launched one by one: gradients that are missing between them
// must be zeroed, and what is left behind be taken away, in between.
std::shared_ptr<Graph> GraphedCallable::merged(const std::vector<Flight>& flights, const std::vector<Bits>& got) {
    if (flights.size() < 2) return nullptr;
    std::vector<std::shared_ptr<Graph>> parts;
    for (size_t i = 0; i < flights.size(); ++i) {
        const GraphedCallable& callable = *flights[i].callable;
        const bool is_last = i + 1 == flights.size();
        const bool got_all = std::find(got[i].begin(), got[i].end(), false) == got[i].end();
        if ((i > 0 && !got_all) || (!is_last && !callable.leaves_nothing_behind(flights[i]))) return nullptr;
        parts.push_back(callable.slot_of(flights[i]).backward);
    }
    MergedBackward& merged = flights.front().callable->slot_of(flights.front()).merged;
    if (!is_same(merged.parts, parts)) {
        merged = {{parts.begin(), parts.end()}, nullptr, 1};
    } else if (++merged.seen == 2) {
        merged.graph = merge(parts);
    }
    return merged.graph;
}

BackwardResults GraphedCallable::backward(std::vector<Flight>& flights, variable_list grads) {
    GraphedCallable& first = *flights.front().callable;
    const c10::DeviceGuard on_device(first.device_);
    for (const Flight& flight : flights) flight.callable->check_backward(flight);

    Scope& scope = *first.scope_;
    const auto alone = scope.enter_backward();
    std::vector<Bits> got{first.load_grad_outputs(first.slot_of(flights.front()), grads)};
    // What is lent moves now: a `.grad` may be among it, and what follows plans where gradients go.
    scope.input_gradients().protect();
    for (size_t i = 0; i < flights.size(); ++i) {
        GraphedCallable& callable = *flights[i].callable;
        if (i > 0) got.push_back(callable.grads_from(flights[i - 1], got.back(), callable.slot_of(flights[i])));
        callable.plan_parameters(flights[i], got.back());
    }
    BackwardResults results;
    if (const auto graph = merged(flights, got)) {
        graph->replay();
        for (size_t i = 0; i < flights.size(); ++i) flights[i].callable->finish(flights[i], got[i], results);
    } else {
        for (size_t i = 0; i < flights.size(); ++i) {
            GraphedCallable& callable = *flights[i].callable;
            Slot& slot = callable.slot_of(flights[i]);
            if (i > 0) {
                scope.input_gradients().protect();
                for (size_t k = 0; k < got[i].size(); ++k) {
                    if (!got[i][k]) fill_with_no_gradient(slot.grad_outputs[k]->tensor);
                }
            }
            slot.backward->replay();
            callable.finish(flights[i], got[i], results);
        }
    }
    sync_backward_caller(first.device_);
    return results;
}

}  // namespace te_graph::graph
