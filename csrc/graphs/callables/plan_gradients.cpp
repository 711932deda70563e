// What becomes of the gradient of each parameter in a backward, and what the table says of it.
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "graphs/callables/callable.h"
#include "graphs/callables/replay_node.h"
#include "graphs/hooks.h"
#include "graphs/modes.h"

namespace te_graph::graphs {

using multi_tensor::Mode;

namespace {

// True when `grad` can be written as a flat run of elements in the order of `source`'s. Complex numbers are added by
// torch, which multiplies by a complex 1 on the way: that turns -0 into 0, and infinities into NaN. So are those whose
// class has no memory but what it wraps.
bool fits(const at::Tensor& grad, const at::Tensor& source, at::ScalarType dtype) {
    return !c10::isComplexType(dtype) && grad.layout() == at::kStrided && grad.scalar_type() == dtype &&
           grad.device() == source.device() && grad.sizes() == source.sizes() && grad.strides() == source.strides() &&
           !grad.is_conj() && !grad.is_neg() && (grad.numel() == 0 || has_memory(grad));
}

// The bytes that a dense tensor occupies, as [begin, end).
std::pair<const char*, const char*> extent(const at::Tensor& tensor) {
    const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
    return {begin, begin + tensor.nbytes()};
}

// Another process may refer to memory that was sent there. What torch's allocators make anew is its own context.
bool was_sent(const c10::Storage& storage) { return storage.data_ptr().get_context() != storage.data(); }

// A tensor over the memory of `buffer` if nothing else refers to that, else over new memory, like `source`. Always a
// tensor of its own: what the user has set on an earlier one (attributes, hooks, flags) went with that.
at::Tensor fresh_grad(const at::Tensor& buffer, const at::Tensor& source) {
    const bool is_ours =
        buffer.defined() && !is_shared(*buffer.storage().unsafeGetStorageImpl()) && !was_sent(buffer.storage());
    if (!is_ours || buffer.storage().nbytes() != source.nbytes()) {
        return at::empty_strided(source.sizes(), source.strides(), source.options());
    }
    return at::Tensor(buffer.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                            /*allow_tensor_metadata_change=*/true));
}

using ExecInfo = torch::autograd::GraphTask::ExecInfo;

bool has_shared_inputs(const PendingBackward& pending) {
    return std::any_of(pending.input_edges.begin(), pending.input_edges.end(),
                       [](const InputEdge& edge) { return edge.is_shared; });
}

// What the engine was asked for about the leaf; null: nothing.
const ExecInfo* request_for(const std::unordered_map<torch::autograd::Node*, ExecInfo>& exec_info,
                            const at::Tensor& leaf) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
    const auto found = accumulator ? exec_info.find(accumulator.get()) : exec_info.end();
    return found != exec_info.end() ? &found->second : nullptr;
}

// True when backward(inputs=...) names a leaf to which no edge leads. The engine then asks for a node of its own in the
// leaf's place, so which one it is cannot be known.
bool asks_for_leaf_without_edge(const std::unordered_map<torch::autograd::Node*, ExecInfo>& exec_info) {
    return std::any_of(exec_info.begin(), exec_info.end(), [](const auto& entry) {
        const auto& [node, request] = entry;
        return request.needed_ && !request.captures_ && node->num_outputs() == 0 &&
               dynamic_cast<const torch::autograd::Identity*>(node) != nullptr;
    });
}

}  // namespace

// Decides what happens to each parameter's gradient, and writes the table. Flags that it resets go to `used_up`, until
// what they ask for is done.
void GraphedCallable::plan_parameters(PendingBackward& pending, const Bits& got, std::vector<MainGradReset*>& used_up) {
    const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
    if (exec_info && exec_info->empty()) exec_info = nullptr;
    const bool asks_without_edge = exec_info && asks_for_leaf_without_edge(*exec_info);
    const bool got_all = std::find(got.begin(), got.end(), false) == got.end();
    Slot& slot = slot_of(pending);
    pending.owes_gradients = false;
    const bool is_kept = torch::autograd::get_current_graph_task_keep_graph();
    slot.last_update.is_repeated = got_all && !exec_info && repeats_last(pending);
    if (slot.last_update.is_repeated) return enter_grad_views(pending);
    slot.updates.resize(parameters_.size());
    auto edge = pending.autograd_parameters.begin();
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const ParameterSpec& spec = parameters_[i];
        const bool has_edge = edge != pending.autograd_parameters.end() && *edge == static_cast<int>(i);
        edge += has_edge;
        const at::Tensor& source = slot.parameter_grads[i];
        const at::Tensor& parameter = (*pending.externals)[spec.tensor];
        const at::Tensor& grad = parameter.grad();
        const ExecInfo* const request = exec_info ? request_for(*exec_info, parameter) : nullptr;
        TORCH_CHECK(has_edge || !request || !request->captures_, name_,
                    ": torch.autograd.grad is asked for the gradient of ", guard_->tensor_name(spec.tensor),
                    ", which the backward accumulates itself: capture with it in autograd_params=");
        const bool inputs_only = exec_info && !(request && request->needed_);
        pending.owes_gradients |= inputs_only && is_kept && !has_edge && parameter.requires_grad();
        const bool is_reached = got_all || any_common(spec.depends_on, got);
        TORCH_CHECK(!(asks_without_edge && inputs_only && is_reached) || has_edge || !parameter.requires_grad(), name_,
                    ": backward(inputs=...) is asked for a leaf that autograd does not lead to, such as ",
                    guard_->tensor_name(spec.tensor),
                    ", which the backward accumulates itself: capture with it in autograd_params=, and leave out what "
                    "the loss does not depend on");
        // Where NaN is looked for, it must not have been added by then: graphs add by themselves only to buffers.
        const bool may_add = !looks_for_nan();
        const auto action =
            decide_gradient({.reached = is_reached,
                             .inputs_only = inputs_only,
                             .through_autograd = has_edge,
                             .hooked_since = !has_edge && has_gradient_hooks(parameter),
                             .frozen_since = !parameter.requires_grad(),
                             .has_main_grad = spec.main_grad >= 0,
                             .main_grad_fits = spec.main_grad_fits && (may_add || spec.has_grad_buffer),
                             .overwrite_main_grad = spec.main_grad_reset && spec.main_grad_reset->is_pending,
                             .has_grad = grad.defined(),
                             .grad_fits = grad.defined() && may_add && fits(grad, source, source.scalar_type())});
        TORCH_CHECK(action != GradientAction::kCallHooks || ReplayNode::count_gradients_of(parameter) < 2, name_,
                    ": a hook was put on ", guard_->tensor_name(spec.tensor),
                    " since the forward, and several gradients of it meet in this backward, those of other calls or "
                    "of a use outside the callable: eager execution runs the hook once, on their sum, which is known "
                    "here only if the hook is there before the forward");
        slot.updates[i].action = action;
        GradView* const view = grad_view_of(parameter);
        if (view && accumulates(action)) view->enter_backward();
        const bool is_in_grad = action == GradientAction::kStoreNew || action == GradientAction::kAddInPlace ||
                                action == GradientAction::kAddEagerly;
        if (is_in_grad && is_in_autograd_graph(parameter)) note_use_outside(i);
        if (action == GradientAction::kStoreNew) {
            slot.updates[i].fresh = view                   ? view->renew()
                                    : spec.has_grad_buffer ? lend_grad_buffer(i)
                                                           : fresh_grad(buffers_[i], source);
        }
        if (action == GradientAction::kStoreMainGrad || action == GradientAction::kStoreMainGradEagerly) {
            if (spec.main_grad_reset->is_pending.exchange(false)) used_up.push_back(spec.main_grad_reset.get());
        }
    }
    // The table does not know the memory of a .grad that is not the buffer in which an op adds up.
    const bool is_elsewhere = std::any_of(buffered_.begin(), buffered_.end(), [&](size_t i) {
        const at::Tensor& tensor = destination(pending, i);
        return tensor.defined() && !is_grad_buffer(i, tensor);
    });
    if (is_elsewhere || !slot.table->matches([&](size_t i) { return write_of(pending, i); })) {
        separate_overlapping(pending);
        for (size_t i = 0; i < slot.table->size(); ++i) slot.table->set(i, write_of(pending, i));
        slot.table->upload();
    }
    prepare_grad_buffers(pending);
    note_for_repetition(pending);
}

// Tells the flat buffers that the gradients lie in that they are about to be written.
void GraphedCallable::enter_grad_views(const PendingBackward& pending) const {
    for (const ParameterSpec& spec : parameters_) {
        if (GradView* const view = grad_view_of((*pending.externals)[spec.tensor])) view->enter_backward();
    }
}

// Tells them that they have been.
void GraphedCallable::note_accumulated(const PendingBackward& pending) const {
    const Slot& slot = slot_of(pending);
    for (size_t i = 0; i < parameters_.size(); ++i) {
        GradView* const view = grad_view_of((*pending.externals)[parameters_[i].tensor]);
        if (view && (slot.last_update.is_repeated || accumulates(slot.updates[i].action))) view->note_accumulated();
    }
}

bool GraphedCallable::is_awaited(const PendingBackward& pending) const {
    return std::any_of(parameters_.begin(), parameters_.end(), [&](const ParameterSpec& spec) {
        const GradView* const view = grad_view_of((*pending.externals)[spec.tensor]);
        return view && view->is_awaited();
    });
}

// Eager code has used the parameter since the forward: there was no edge, so this gradient is added by itself.
void GraphedCallable::note_use_outside(size_t parameter) {
    ParameterSpec& spec = parameters_[parameter];
    if (spec.through_autograd) return;
    spec.through_autograd = true;
    TORCH_WARN(
        name_, ": ", guard_->tensor_name(spec.tensor),
        " is used outside the callable as well, since its forward; this backward adds both gradients one after the "
        "other, later ones add their sum as eager execution does. Pass it in autograd_params= to have that from "
        "the start");
}

// True when all gradients are to be added to the very tensors that the last backward of the slot added to. `.grad` may
// have been replaced, or its memory: only a look shows it.
bool GraphedCallable::repeats_last(const PendingBackward& pending) const {
    const LastUpdate& last = slot_of(pending).last_update;
    const bool is_plain = pending.autograd_parameters.empty() && !has_shared_inputs(pending) && !looks_for_nan();
    if (!last.is_possible || !is_plain) return false;
    const FoundTensors& externals = *pending.externals;
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const ParameterSpec& spec = parameters_[i];
        if (spec.main_grad >= 0 && spec.main_grad_reset->is_pending) return false;
        const torch::autograd::AutogradMeta* const meta = autograd_meta_of(externals[spec.tensor]);
        if (!meta || !meta->requires_grad_ || has_gradient_hooks(*meta)) return false;
        if (spec.main_grad < 0 && !meta->grad_accumulator_.expired()) return false;
        const at::Tensor& tensor = spec.main_grad >= 0 ? main_grad_of(pending, i) : meta->grad_;
        const auto& [impl, facts] = last.destinations[i];
        if (tensor.unsafeGetTensorImpl() != impl || !facts.match(tensor)) return false;
    }
    return true;
}

void GraphedCallable::note_for_repetition(const PendingBackward& pending) {
    Slot& slot = slot_of(pending);
    LastUpdate& last_update = slot.last_update;
    last_update.destinations.clear();
    const auto adds = [](const ParameterUpdate& update) {
        return update.action == GradientAction::kAddInPlace || update.action == GradientAction::kAddMainGrad;
    };
    last_update.is_possible =
        !has_shared_inputs(pending) && std::all_of(slot.updates.begin(), slot.updates.end(), adds);
    for (size_t i = 0; last_update.is_possible && i < parameters_.size(); ++i) {
        const at::Tensor& tensor = destination(pending, i);
        last_update.is_possible = !parameters_[i].has_grad_buffer || is_grad_buffer(i, tensor);
        last_update.destinations.emplace_back(tensor.unsafeGetTensorImpl(), TensorFacts(tensor));
    }
}

// The graph has run, and with it what the table stores.
void GraphedCallable::note_stored(const PendingBackward& pending, std::vector<MainGradReset*>& used_up) const {
    const Slot& slot = slot_of(pending);
    if (used_up.empty() || slot.last_update.is_repeated) return;
    for (size_t i = 0; i < parameters_.size(); ++i) {
        if (slot.updates[i].action == GradientAction::kStoreMainGrad)
            std::erase(used_up, parameters_[i].main_grad_reset.get());
    }
}

// What the table shall do for a parameter.
GradientTable::EntryWrite GraphedCallable::write_of_parameter(const PendingBackward& pending, size_t parameter) const {
    const at::Tensor& tensor = destination(pending, parameter);
    if (!tensor.defined() || parameters_[parameter].has_grad_buffer) return {Mode::kSkip, nullptr};
    const GradientAction action = slot_of(pending).updates[parameter].action;
    const bool stores = action == GradientAction::kStoreNew || action == GradientAction::kStoreMainGrad;
    return {stores ? Mode::kStore : Mode::kAdd, tensor.mutable_data_ptr()};
}

// What the table shall do in any of its entries. The uses of a shared input go to autograd one by one.
GradientTable::EntryWrite GraphedCallable::write_of(const PendingBackward& pending, size_t entry) const {
    if (entry < parameters_.size()) return write_of_parameter(pending, entry);
    const Slot& slot = slot_of(pending);
    const int input = slot.summed_inputs[entry - parameters_.size()];
    const bool is_shared =
        std::any_of(pending.input_edges.begin(), pending.input_edges.end(),
                    [input](const InputEdge& edge) { return edge.is_shared && edge.input == input; });
    if (input < 0 || is_shared) return {Mode::kSkip, nullptr};
    return {Mode::kAdd, slot.grad_inputs.tensors()[input].mutable_data_ptr()};
}

// What the table writes for a parameter, or an undefined tensor.
const at::Tensor& GraphedCallable::destination(const PendingBackward& pending, size_t parameter) const {
    static const at::Tensor none;
    const ParameterUpdate& update = slot_of(pending).updates[parameter];
    switch (update.action) {
        case GradientAction::kStoreNew:
            return update.fresh;
        case GradientAction::kAddInPlace:
            return (*pending.externals)[parameters_[parameter].tensor].grad();
        case GradientAction::kStoreMainGrad:
        case GradientAction::kAddMainGrad:
            return main_grad_of(pending, parameter);
        case GradientAction::kNothing:
        case GradientAction::kReturn:
        case GradientAction::kCallHooks:
        case GradientAction::kAddEagerly:
        case GradientAction::kStoreMainGradEagerly:
        case GradientAction::kAddMainGradEagerly:
            break;
    }
    return none;
}

const at::Tensor& GraphedCallable::main_grad_of(const PendingBackward& pending, size_t parameter) const {
    return (*pending.externals)[parameters_[parameter].main_grad];
}

// One launch may not write the same memory twice. Gradients that the user has put into common memory are added one
// after the other; gradients that we allocated cannot be.
void GraphedCallable::separate_overlapping(const PendingBackward& pending) const {
    std::vector<ParameterUpdate>& updates = slot_of(pending).updates;
    bool has_foreign = false;
    std::vector<size_t> written;
    for (size_t i = 0; i < updates.size(); ++i) {
        const at::Tensor& tensor = destination(pending, i);
        if (!tensor.defined()) continue;
        written.push_back(i);
        has_foreign |= updates[i].action != GradientAction::kStoreNew && !is_grad_buffer(i, tensor) &&
                       !(buffers_[i].defined() && buffers_[i].is_alias_of(tensor));
    }
    if (!has_foreign) return;
    const auto before = [&](size_t a, size_t b) {
        return extent(destination(pending, a)) < extent(destination(pending, b));
    };
    std::sort(written.begin(), written.end(), before);
    const auto add_eagerly = [&](size_t i) {
        if (updates[i].action == GradientAction::kAddInPlace) updates[i].action = GradientAction::kAddEagerly;
    };
    // A buffer is copied back as a whole, over what is added meanwhile to what lies across.
    const auto is_copied_back = [&](size_t i) {
        return parameters_[i].has_grad_buffer && !is_grad_buffer(i, destination(pending, i));
    };
    const char *end = nullptr, *end_of_all = nullptr;
    size_t furthest = 0;
    for (const size_t i : written) {
        const auto [from, to] = extent(destination(pending, i));
        if (from < end_of_all) {
            for (const size_t one : {i, furthest}) {
                if (is_copied_back(one)) add_eagerly(one);
            }
        }
        if (to > end_of_all) {
            end_of_all = to;
            furthest = i;
        }
        if (from < end && updates[i].action == GradientAction::kAddInPlace) {
            add_eagerly(i);
        } else {
            end = std::max(end, to);
        }
    }
}

}  // namespace te_graph::graphs
