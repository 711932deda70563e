// What one callable does in a backward: gradients in, table entries, and .grad as eager execution would leave it.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "graph/callable.h"
#include "graph/copy.h"
#include "graph/hooks.h"
#include "graph/replay_node.h"

namespace te_graph::graph {

namespace impl = torch::autograd::impl;
using multi_tensor::Mode;
using torch::autograd::variable_list;

namespace {

bool any_common(const std::vector<bool>& a, const std::vector<bool>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] && b[i]) return true;
    }
    return false;
}

// True when `grad` can be written as a flat run of elements in the order of `source`'s.
bool fits(const at::Tensor& grad, const at::Tensor& source, at::ScalarType dtype) {
    return grad.layout() == at::kStrided && grad.scalar_type() == dtype && grad.device() == source.device() &&
           grad.sizes() == source.sizes() && grad.strides() == source.strides() && !grad.is_conj() && !grad.is_neg();
}

// The bytes that a dense tensor occupies, as [begin, end).
std::pair<const char*, const char*> extent(const at::Tensor& tensor) {
    const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
    return {begin, begin + tensor.nbytes()};
}

// A tensor that is nobody's but ours: neither the tensor nor its memory is referred to from elsewhere. A Python wrapper
// that only the tensor itself keeps alive is no owner.
bool is_ours_alone(const at::Tensor& tensor) {
    if (!tensor.defined()) return false;
    const size_t owners = tensor.unsafeGetTensorImpl()->pyobj_slot()->has_unique_reference() ? 2 : 1;
    return tensor.use_count() <= owners && tensor.storage().use_count() == 1;
}

}  // namespace

void GraphedCallable::check_backward(const Flight& flight) const {
    const FoundTensors& externals = *flight.externals;
    const std::string change = guard_->check_tensors(externals);
    TORCH_CHECK(change.empty(), changed(change).message);
    for (size_t i = 0; i < saved_.size(); ++i) {
        const uint32_t expected = flight.saved_versions[i], found = version_of(externals[saved_[i]]);
        TORCH_CHECK(found == expected, name_, ": ", guard_->tensor_name(saved_[i]),
                    " is needed for backward and has been modified by an inplace operation since the forward: it is at "
                    "version ",
                    found, "; expected version ", expected);
    }
    for (const LinkedInput& linked : flight.linked_inputs) {
        TORCH_CHECK(linked.version.current_version() == linked.version_at_forward, name_, ": ",
                    inputs_[linked.input].name,
                    " is needed for backward and has been modified by an inplace operation since the forward");
    }
    size_t saved = 0;
    for (size_t i = 0; i < saved_outputs_.size(); ++i) {
        TORCH_CHECK(!saved_outputs_[i] || flight.output_versions[saved++].current_version() == 0, name_, ": output ", i,
                    " is needed for backward and has been modified by an inplace operation");
    }
}

// Puts the gradients of the outputs where the graph reads them; returns which outputs got one. What is in place is let
// go of at once, so that memory lent by the graph that made it is known to be free again.
GraphedCallable::Bits GraphedCallable::load_grad_outputs(Slot& slot, variable_list& grads) const {
    const auto load = [](Staging& staging, at::Tensor& grad) {
        if (grad.defined()) {
            copy_into(staging.tensor, grad);
            grad.reset();
            staging.is_zero = false;
        } else if (!staging.is_zero) {
            fill_with_no_gradient(staging.tensor);
            staging.is_zero = !staging.is_lent;
        }
    };
    Bits got(grads.size());
    std::vector<size_t> elsewhere;
    for (size_t i = 0; i < grads.size(); ++i) {
        Staging& staging = *slot.grad_outputs[i];
        got[i] = grads[i].defined();
        if (staging.is_lent && staging.holds(grads[i])) {
            grads[i].reset();
        } else if (staging.is_lent) {
            elsewhere.push_back(i);
        } else {
            load(staging, grads[i]);
        }
    }
    // Somebody may hold gradients that lie where these are to be written.
    if (!elsewhere.empty()) scope_->input_gradients().protect();
    for (const size_t i : elsewhere) load(*slot.grad_outputs[i], grads[i]);
    return got;
}

namespace {

// True when backward(inputs=...) names the leaf.
bool is_requested(const std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>& exec_info,
                  const at::Tensor& leaf) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
    const auto found = accumulator ? exec_info.find(accumulator.get()) : exec_info.end();
    return found != exec_info.end() && found->second.needed_;
}

}  // namespace

// Decides what happens to each parameter's gradient, and tells the table.
void GraphedCallable::plan_parameters(const Flight& flight, const Bits& got) {
    const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
    if (exec_info && exec_info->empty()) exec_info = nullptr;
    const bool got_all = std::find(got.begin(), got.end(), false) == got.end();
    Slot& slot = slot_of(flight);
    slot.repetition.happens = got_all && !exec_info && repeats_last(flight);
    if (slot.repetition.happens) return;
    slot.pending.resize(parameters_.size());
    auto edge = flight.autograd_parameters.begin();
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const ParameterSpec& spec = parameters_[i];
        const bool has_edge = edge != flight.autograd_parameters.end() && *edge == static_cast<int>(i);
        edge += has_edge;
        const at::Tensor& source = slot.parameter_grads[i];
        const at::Tensor& parameter = (*flight.externals)[spec.tensor];
        const at::Tensor& grad = parameter.grad();
        const auto action = plan_gradient({.reached = got_all || any_common(spec.depends_on, got),
                                           .inputs_only = exec_info && !is_requested(*exec_info, parameter),
                                           .through_autograd = has_edge,
                                           .hooked_since = !has_edge && has_gradient_hooks(parameter),
                                           .frozen_since = !parameter.requires_grad(),
                                           .has_main_grad = spec.main_grad >= 0,
                                           .overwrite_main_grad = spec.flag && spec.flag->overwrite,
                                           .has_grad = grad.defined(),
                                           .grad_fits = grad.defined() && fits(grad, source, source.scalar_type())});
        slot.pending[i].action = action;
        if (action == GradientAction::kStoreNew) {
            slot.pending[i].fresh = is_ours_alone(buffers_[i])
                                        ? buffers_[i]
                                        : at::empty_strided(source.sizes(), source.strides(), source.options());
        }
        if (action == GradientAction::kStoreMainGrad) spec.flag->overwrite = false;
    }
    if (!slot.table->says([&](size_t i) { return entry_of(flight, i); })) {
        separate_overlapping(flight);
        for (size_t i = 0; i < slot.table->size(); ++i) slot.table->set(i, entry_of(flight, i));
        slot.table->upload();
    }
    note_for_repetition(flight);
}

// True when all gradients are to be added to the very tensors that the last backward of the slot added to. `.grad` may
// have been replaced, or its memory: nothing tells but to look.
bool GraphedCallable::repeats_last(const Flight& flight) const {
    const Repetition& last = slot_of(flight).repetition;
    if (!last.is_possible || !flight.autograd_parameters.empty()) return false;
    const FoundTensors& externals = *flight.externals;
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const ParameterSpec& spec = parameters_[i];
        if (spec.main_grad >= 0 && spec.flag->overwrite) return false;
        const torch::autograd::AutogradMeta* const meta = meta_of(externals[spec.tensor]);
        if (!meta || !meta->requires_grad_ || has_gradient_hooks(*meta)) return false;
        const at::Tensor& tensor = spec.main_grad >= 0 ? externals[spec.main_grad] : meta->grad_;
        const auto& [impl, facts] = last.destinations[i];
        if (tensor.unsafeGetTensorImpl() != impl || !facts.match(tensor)) return false;
    }
    return true;
}

void GraphedCallable::note_for_repetition(const Flight& flight) {
    Slot& slot = slot_of(flight);
    Repetition& repetition = slot.repetition;
    repetition.destinations.clear();
    const auto adds = [](const Pending& pending) {
        return pending.action == GradientAction::kAddInPlace || pending.action == GradientAction::kAddMainGrad;
    };
    repetition.is_possible = std::all_of(slot.pending.begin(), slot.pending.end(), adds);
    for (size_t i = 0; repetition.is_possible && i < parameters_.size(); ++i) {
        const at::Tensor& tensor = destination(flight, i);
        repetition.destinations.emplace_back(tensor.unsafeGetTensorImpl(), TensorFacts(tensor));
    }
}

// What the table shall say for a parameter.
GradientTable::Order GraphedCallable::entry_of(const Flight& flight, size_t parameter) const {
    const at::Tensor& tensor = destination(flight, parameter);
    if (!tensor.defined()) return {Mode::kSkip, nullptr};
    const GradientAction action = slot_of(flight).pending[parameter].action;
    const bool stores = action == GradientAction::kStoreNew || action == GradientAction::kStoreMainGrad;
    return {stores ? Mode::kStore : Mode::kAdd, tensor.mutable_data_ptr()};
}

// What the table writes for a parameter, or an undefined tensor.
const at::Tensor& GraphedCallable::destination(const Flight& flight, size_t parameter) const {
    static const at::Tensor none;
    const Pending& pending = slot_of(flight).pending[parameter];
    switch (pending.action) {
        case GradientAction::kStoreNew:
            return pending.fresh;
        case GradientAction::kAddInPlace:
            return (*flight.externals)[parameters_[parameter].tensor].grad();
        case GradientAction::kStoreMainGrad:
        case GradientAction::kAddMainGrad:
            return (*flight.externals)[parameters_[parameter].main_grad];
        case GradientAction::kNothing:
        case GradientAction::kReturn:
        case GradientAction::kCallHooks:
        case GradientAction::kAddEagerly:
            break;
    }
    return none;
}

// One launch may not write the same memory twice. Gradients that the user has put into common memory are added one
// after the other; gradients that we allocated cannot be.
void GraphedCallable::separate_overlapping(const Flight& flight) const {
    std::vector<Pending>& pending = slot_of(flight).pending;
    bool has_foreign = false;
    std::vector<size_t> written;
    for (size_t i = 0; i < pending.size(); ++i) {
        const at::Tensor& tensor = destination(flight, i);
        if (!tensor.defined()) continue;
        written.push_back(i);
        has_foreign |= !tensor.is_same(buffers_[i]) && pending[i].action != GradientAction::kStoreNew;
    }
    if (!has_foreign) return;
    const auto before = [&](size_t a, size_t b) {
        return extent(destination(flight, a)) < extent(destination(flight, b));
    };
    std::sort(written.begin(), written.end(), before);
    const char* end = nullptr;
    for (const size_t i : written) {
        const auto [from, to] = extent(destination(flight, i));
        if (from < end && pending[i].action == GradientAction::kAddInPlace) {
            pending[i].action = GradientAction::kAddEagerly;
        } else {
            end = std::max(end, to);
        }
    }
}

// Once the graph has been launched: sets .grad, and appends what the edges of the flight get.
void GraphedCallable::finish(const Flight& flight, const Bits& got, variable_list& results) {
    Slot& slot = slot_of(flight);
    ++backward_replays_;
    if (!flight.input_edges.empty()) {
        const auto lent = slot.grad_inputs.hand_out(scope_->input_gradients());
        for (const InputEdge& edge : flight.input_edges) {
            if (!any_common(inputs_[edge.input].depends_on, got)) {
                results.emplace_back();
            } else {
                // A leaf keeps what it gets as .grad, which must not move under its holder.
                results.push_back(edge.is_leaf ? lent[edge.input].clone() : lent[edge.input]);
            }
        }
    }
    if (slot.repetition.happens) {
        for (const auto& [impl, facts] : slot.repetition.destinations) impl->bump_version();
        return;
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const at::Tensor& parameter = (*flight.externals)[parameters_[i].tensor];
        Pending& pending = slot.pending[i];
        switch (pending.action) {
            case GradientAction::kStoreNew:
                parameter.mutable_grad() = pending.fresh;
                buffers_[i] = std::move(pending.fresh);
                break;
            case GradientAction::kAddEagerly:
                parameter.mutable_grad().add_(slot.parameter_grads[i]);
                break;
            case GradientAction::kStoreMainGrad:
            case GradientAction::kAddInPlace:
            case GradientAction::kAddMainGrad:
                destination(flight, i).unsafeGetTensorImpl()->bump_version();
                break;
            case GradientAction::kCallHooks:
                accumulate_with_hooks(parameter, slot.parameter_grads[i].clone());
                break;
            case GradientAction::kNothing:
            case GradientAction::kReturn:
                break;
        }
    }
    for (const int i : flight.autograd_parameters) {
        const bool returns = slot.pending[i].action == GradientAction::kReturn;
        results.push_back(returns ? slot.parameter_grads[i].clone() : at::Tensor());
    }
}

}  // namespace te_graph::graph
