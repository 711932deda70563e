// The backward of one call, or of several calls that follow each other in a chain.
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "graphs/callables/callable.h"
#include "graphs/callables/copy.h"

namespace te_graph::graphs {

using torch::autograd::variable_list;

namespace {

bool is_same(const std::vector<std::weak_ptr<Graph>>& known, const std::vector<std::shared_ptr<Graph>>& parts) {
    const auto equal = [](const std::weak_ptr<Graph>& a, const std::shared_ptr<Graph>& b) { return a.lock() == b; };
    return std::equal(known.begin(), known.end(), parts.begin(), parts.end(), equal);
}

std::vector<bool> which_are_defined(const variable_list& grads) {
    std::vector<bool> defined;
    for (const at::Tensor& grad : grads) defined.push_back(grad.defined());
    return defined;
}

}  // namespace

bool GraphedCallable::continues(const PendingBackward& upper, const PendingBackward& lower) const {
    const GraphedCallable& below = *lower.callable;
    if (predecessor_ != below.leases_ || upper.lease.slot() != lower.lease.slot()) return false;
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
GraphedCallable::Bits GraphedCallable::grads_from(const PendingBackward& upper, const Bits& got_upper,
                                                  const Slot& slot) const {
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
bool GraphedCallable::leaves_nothing_behind(const PendingBackward& pending) const {
    const auto stays = [](const ParameterUpdate& update) {
        return update.action == GradientAction::kAddEagerly || update.action == GradientAction::kReturn ||
               update.action == GradientAction::kCallHooks || update.action == GradientAction::kStoreMainGradEagerly ||
               update.action == GradientAction::kAddMainGradEagerly;
    };
    const Slot& slot = slot_of(pending);
    const auto& updates = slot.updates;
    return pending.input_edges.empty() &&
           (slot.last_update.is_repeated || std::none_of(updates.begin(), updates.end(), stays));
}

// The graph of all `chain`, or null when they have to be launched one by one: gradients that are missing between them
// must be zeroed, and what is left behind be taken away, in between, or gradients of one are awaited before the next.
std::shared_ptr<Graph> GraphedCallable::merged(const std::vector<PendingBackward>& chain,
                                               const std::vector<Bits>& got) {
    if (chain.size() < 2) return nullptr;
    const auto is_awaited = [](const PendingBackward& pending) { return pending.callable->is_awaited(pending); };
    if (std::any_of(chain.begin(), chain.end(), is_awaited)) return nullptr;
    std::vector<std::shared_ptr<Graph>> parts;
    for (size_t i = 0; i < chain.size(); ++i) {
        const GraphedCallable& callable = *chain[i].callable;
        const bool is_last = i + 1 == chain.size();
        const bool got_all = std::find(got[i].begin(), got[i].end(), false) == got[i].end();
        if ((i > 0 && !got_all) || (!is_last && !callable.leaves_nothing_behind(chain[i]))) return nullptr;
        parts.push_back(callable.slot_of(chain[i]).backward);
    }
    MergedBackward& merged = chain.front().callable->slot_of(chain.front()).merged;
    if (!is_same(merged.parts, parts)) {
        merged = {{parts.begin(), parts.end()}, nullptr, 1, repeats_a_step(chain)};
    } else if (++merged.seen == 2 && !merged.repeats_a_step) {
        merged.graph = merge(parts);
    }
    return merged.graph;
}

// Whether the host does the same before two of `chain`: then it has to do it in between.
bool GraphedCallable::repeats_a_step(const std::vector<PendingBackward>& chain) {
    std::vector<const HostStep*> before;
    for (const PendingBackward& pending : chain) {
        const HostSteps::List& own = pending.callable->slot_of(pending).host_steps.of(Direction::kBackward);
        for (const auto& step : own) {
            const auto is_repeated = [&](const HostStep* other) { return step->repeats(*other); };
            if (std::any_of(before.begin(), before.end(), is_repeated)) return true;
        }
        for (const auto& step : own) before.push_back(step.get());
    }
    return false;
}

BackwardResults GraphedCallable::backward(std::vector<PendingBackward>& chain, variable_list grads) {
    GraphedCallable& first = *chain.front().callable;
    const c10::DeviceGuard on_device(first.device_);
    for (const PendingBackward& pending : chain) {
        pending.callable->check_backward(pending);
        pending.callable->warn_of_autocast();
    }

    ReplayOrder& replay_order = *first.replay_order_;
    const auto alone = replay_order.enter_backward();
    std::vector<Bits> got{which_are_defined(grads)};
    for (size_t i = 0; i < chain.size(); ++i) {
        GraphedCallable& callable = *chain[i].callable;
        if (i > 0) got.push_back(callable.grads_from(chain[i - 1], got.back(), callable.slot_of(chain[i])));
        callable.check_nonlinear_parts(got.back());
    }
    first.load_grad_outputs(first.slot_of(chain.front()), grads);
    // What is lent moves now: a `.grad` may be among it, and what follows plans where gradients go.
    replay_order.input_gradients().protect();
    std::vector<MainGradReset*> used_up;
    const auto on_failure = c10::make_scope_exit([&] {
        for (MainGradReset* const reset : used_up) reset->is_pending = true;
    });
    for (size_t i = 0; i < chain.size(); ++i) chain[i].callable->plan_parameters(chain[i], got[i], used_up);
    BackwardResults results;
    if (const auto graph = merged(chain, got)) {
        const auto steps_of = [](const PendingBackward& one) -> HostSteps& {
            return one.callable->slot_of(one).host_steps;
        };
        for (const PendingBackward& pending : chain) steps_of(pending).prepare(Direction::kBackward);
        for (const PendingBackward& pending : chain) steps_of(pending).run(Direction::kBackward);
        graph->replay();
        for (const PendingBackward& pending : chain) steps_of(pending).finish(Direction::kBackward);
        for (const PendingBackward& pending : chain) pending.callable->note_stored(pending, used_up);
        for (size_t i = 0; i < chain.size(); ++i) chain[i].callable->finish(chain[i], got[i], used_up, results);
    } else {
        for (size_t i = 0; i < chain.size(); ++i) {
            GraphedCallable& callable = *chain[i].callable;
            Slot& slot = callable.slot_of(chain[i]);
            if (i > 0) {
                replay_order.input_gradients().protect();
                for (size_t k = 0; k < got[i].size(); ++k) {
                    if (!got[i][k]) fill_with_negative_zeros(slot.grad_outputs[k]->tensor);
                }
            }
            slot.host_steps.prepare(Direction::kBackward);
            slot.host_steps.run(Direction::kBackward);
            slot.backward->replay();
            slot.host_steps.finish(Direction::kBackward);
            callable.note_stored(chain[i], used_up);
            callable.finish(chain[i], got[i], used_up, results);
        }
    }
    sync_backward_caller(first.device_);
    return results;
}

}  // namespace te_graph::graphs
