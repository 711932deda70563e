// What one callable does in a backward: gradients in, and .grad as eager execution would leave it.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isnan.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "graphs/callables/callable.h"
#include "graphs/callables/copy.h"
#include "graphs/callables/gradient_plan.h"
#include "graphs/callables/replay_node.h"
#include "graphs/hooks.h"
#include "graphs/modes.h"

namespace te_graph::graphs {

namespace impl = torch::autograd::impl;
using torch::autograd::variable_list;

namespace {

// What AccumulateGrad does where there is a `.grad`, of whatever layout.
void accumulate(const at::Tensor& parameter, const at::Tensor& gradient) {
    torch::autograd::AccumulateGrad::accumulateGrad(
        parameter, parameter.mutable_grad(), gradient, /*num_expected_refs=*/1,
        [&](at::Tensor&& sum) { parameter.mutable_grad() = std::move(sum); });
}

}  // namespace

void GraphedCallable::check_backward(const PendingBackward& pending) const {
    const FoundTensors& externals = *pending.externals;
    const std::string change = guard_->check_tensors(externals);
    TORCH_CHECK(change.empty(), changed(change).message);
    if (backward_guard_) check_what_backward_reads();
    for (size_t i = 0; i < saved_.size(); ++i) {
        const uint32_t expected = pending.saved_versions[i], found = version_of(externals[saved_[i]]);
        TORCH_CHECK(found == expected, name_, ": ", guard_->tensor_name(saved_[i]),
                    " is needed for backward and has been modified by an inplace operation since the forward: it is at "
                    "version ",
                    found, "; expected version ", expected);
    }
    for (const LinkedInput& linked : pending.linked_inputs) {
        TORCH_CHECK(linked.version.current_version() == linked.version_at_forward, name_, ": ",
                    inputs_[linked.input].name,
                    " is needed for backward and has been modified by an inplace operation since the forward");
    }
    size_t saved = 0;
    for (size_t i = 0; i < saved_outputs_.size(); ++i) {
        TORCH_CHECK(!saved_outputs_[i] || pending.output_versions[saved++].current_version() == 0, name_, ": output ",
                    i, " is needed for backward and has been modified by an inplace operation");
    }
}

void GraphedCallable::check_what_backward_reads() const {
    const pybind11::gil_scoped_acquire gil;
    CallableGuard::Tensors none;
    const std::string change = backward_guard_->is_rooted() ? backward_guard_->check(Py_None, none) : std::string();
    TORCH_CHECK(change.empty(), name_, ": ", change,
                " since the forward, and code that the backward runs reads it, which a replay would not do: change it "
                "before the forward or after the backward");
}

void GraphedCallable::check_nonlinear_parts(const Bits& got) const {
    for (const NonlinearPart& part : nonlinear_parts_) {
        TORCH_CHECK(any_common(part.outputs, got), name_, ": ", part.message);
    }
}

// Puts the gradients of the outputs where the graph reads them. What is in place is let go of at once, so that memory
// lent by the graph that made it is known to be free again.
void GraphedCallable::load_grad_outputs(Slot& slot, variable_list& grads) const {
    const auto load = [&](size_t number, at::Tensor& grad) {
        Staging& staging = *slot.grad_outputs[number];
        if (grad.defined()) {
            TORCH_CHECK(grad.layout() == at::kStrided, name_, ": expected a dense gradient of output ",
                        differentiable_[number], ", got one of layout ", grad.layout(), ": call .to_dense() on it");
            if (lie_in_other_order(grad, staging.tensor)) {
                note_layout(
                    reordered_grads_, number, "the gradient of output " + std::to_string(differentiable_[number]), grad,
                    staging.tensor,
                    "Give graph_layers a step with its backward, which shows how gradients lie, or capture what "
                    "is around this callable");
            }
            copy_into(staging.tensor, grad);
            grad.reset();
            staging.is_zero = false;
        } else if (!staging.is_zero) {
            fill_with_negative_zeros(staging.tensor);
            staging.is_zero = !staging.is_lent && !staging.is_written;
        }
    };
    std::vector<size_t> elsewhere;
    for (size_t i = 0; i < grads.size(); ++i) {
        Staging& staging = *slot.grad_outputs[i];
        if (staging.is_lent && staging.holds(grads[i])) {
            grads[i].reset();
        } else if (staging.is_lent) {
            elsewhere.push_back(i);
        } else {
            load(i, grads[i]);
        }
    }
    // Gradients that are still held may lie where these are to be written.
    if (!elsewhere.empty()) replay_order_->input_gradients().protect();
    for (const size_t i : elsewhere) load(i, grads[i]);
}

bool GraphedCallable::has_parameter(const PendingBackward& pending, const at::Tensor& leaf) const {
    return std::any_of(parameters_.begin(), parameters_.end(),
                       [&](const ParameterSpec& spec) { return (*pending.externals)[spec.tensor].is_same(leaf); });
}

// Schedules that split the backward ask for the gradients of inputs, and later for those of weights through edges to
// AccumulateGrad nodes, which parameters inside a graph do not have.
void GraphedCallable::warn_of_lost_gradients() {
    if (has_warned_of_lost_gradients_) return;
    has_warned_of_lost_gradients_ = true;
    TORCH_WARN(name_,
               ": an earlier backward was for inputs alone, with retain_graph=True, and none followed for its "
               "parameters. Where none was to follow (autograd.grad for inputs, jacobian) all is as in eager "
               "execution. A schedule that splits the backward (zero bubble) misses their gradients, and needs "
               "te_graph.pipeline.prepare_stage(stage), which gives the PipelineStage a dw_builder");
}

// Eager execution would cast in such a backward what autocast lists, in whatever dtype the forward ran.
void GraphedCallable::warn_of_autocast() {
    if (has_warned_of_autocast_ || !at::autocast::is_autocast_enabled(device_.type())) return;
    has_warned_of_autocast_ = true;
    TORCH_WARN(name_,
               ": backward is called inside an autocast region; its replay computes as captured, without autocast, "
               "where eager execution would autocast: call backward() outside the region");
}

// Tells, once for each tensor, that the graph reads what is `given` in another layout than eager execution would.
void GraphedCallable::note_layout(std::vector<bool>& noted, size_t number, const std::string& what,
                                  const at::Tensor& given, const at::Tensor& captured, const char* advice) const {
    noted.resize(std::max(noted.size(), number + 1));
    if (noted[number]) return;
    noted[number] = true;
    TORCH_WARN(
        name_, ": ", what, " has strides ", given.strides(), ", and the graph reads it with ", captured.strides(),
        ", as at capture: kernels that choose by memory layout may round otherwise than in eager execution. ", advice);
}

// Megatron-LM has a hook that adds `.grad` to `main_grad`: then this is right, and what eager execution does.
void GraphedCallable::note_main_grad_unused(size_t number) const {
    unused_main_grads_.resize(parameters_.size());
    if (unused_main_grads_[number]) return;
    unused_main_grads_[number] = true;
    TORCH_WARN(name_, ": ", guard_->tensor_name(parameters_[number].tensor),
               " has a main_grad, and hooks or autograd_params= by which autograd gets its gradient, as in eager "
               "execution: it is left in .grad, and main_grad as it is, unless a hook adds it there");
}

// Anomaly detection looks at what nodes return, where gradients of parameters are not.
void GraphedCallable::check_for_nan(const PendingBackward& pending) const {
    if (!looks_for_nan()) return;
    const Slot& slot = slot_of(pending);
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const bool is_computed = slot.last_update.is_repeated || slot.updates[i].action != GradientAction::kNothing;
        TORCH_CHECK(!is_computed || !at::isnan(slot.parameter_grads[i]).any().item<bool>(), name_,
                    ": the backward returned nan values in the gradient of ",
                    guard_->tensor_name(parameters_[i].tensor));
    }
}

// Once the graph has been launched: sets .grad, and appends what the edges of its node get. Flags of what it stores are
// no longer in `used_up`.
void GraphedCallable::finish(const PendingBackward& pending, const Bits& got, std::vector<MainGradReset*>& used_up,
                             BackwardResults& results) {
    Slot& slot = slot_of(pending);
    ++backward_replays_;
    const auto at_the_end = c10::make_scope_exit([&] { restore_main_grads(pending); });  // also where this raises
    check_for_nan(pending);
    if (!pending.input_edges.empty()) {
        const auto lent = slot.grad_inputs.lend(replay_order_->input_gradients());
        const bool is_of_several_threads = replay_order_->is_of_several_threads();
        for (const InputEdge& edge : pending.input_edges) {
            const size_t end = results.gradients.size() + edge.uses;
            if (any_common(inputs_[edge.input].depends_on, got)) {
                if (edge.is_shared) {
                    for (const at::Tensor& grad : slot.use_grads[edge.input]) results.gradients.push_back(grad.clone());
                } else {
                    // A leaf keeps what it gets as .grad, which must not move under its holder.
                    const bool is_lent = !edge.is_leaf && !is_of_several_threads;
                    results.gradients.push_back(is_lent ? lent[edge.input] : lent[edge.input].clone());
                }
            }
            results.gradients.resize(end);
        }
    }
    if (slot.last_update.is_repeated) {
        for (const auto& [impl, facts] : slot.last_update.destinations) impl->bump_version();
        return note_accumulated(pending);
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const at::Tensor& parameter = (*pending.externals)[parameters_[i].tensor];
        ParameterUpdate& update = slot.updates[i];
        switch (update.action) {
            case GradientAction::kStoreNew:
                if (!parameters_[i].has_grad_buffer && !grad_view_of(parameter) &&
                    !(buffers_[i].defined() && buffers_[i].is_alias_of(update.fresh))) {
                    buffers_[i] = update.fresh.detach();
                }
                parameter.mutable_grad() = std::move(update.fresh);
                break;
            case GradientAction::kAddEagerly:
                accumulate(parameter, slot.parameter_grads[i]);
                break;
            case GradientAction::kStoreMainGradEagerly:
                main_grad_of(pending, i).copy_(slot.parameter_grads[i]);
                std::erase(used_up, parameters_[i].main_grad_reset.get());
                break;
            case GradientAction::kAddMainGradEagerly:
                main_grad_of(pending, i).add_(slot.parameter_grads[i]);
                break;
            case GradientAction::kAddInPlace:
                if (parameters_[i].has_grad_buffer && !is_grad_buffer(i, parameter.grad())) {
                    const at::NoGradGuard no_grad;
                    parameter.mutable_grad().copy_(slot.parameter_grads[i]);
                    break;
                }
                [[fallthrough]];
            case GradientAction::kStoreMainGrad:
            case GradientAction::kAddMainGrad:
                destination(pending, i).unsafeGetTensorImpl()->bump_version();
                break;
            case GradientAction::kCallHooks:
                results.hooked.push_back({parameter, slot.parameter_grads[i].clone()});
                break;
            case GradientAction::kNothing:
            case GradientAction::kReturn:
                break;
        }
    }
    note_accumulated(pending);
    for (const int i : pending.autograd_parameters) {
        const bool returns = slot.updates[i].action == GradientAction::kReturn;
        results.gradients.push_back(returns ? slot.parameter_grads[i].clone() : at::Tensor());
    }
}

}  // namespace te_graph::graphs
