// The forward replay.
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <sstream>

#include "common/abort_flag.h"
#include "common/dtype_name.h"
#include "common/node_pointer.h"
#include "graphs/callables/callable.h"
#include "graphs/callables/copy.h"
#include "graphs/callables/observers.h"
#include "graphs/callables/replay_node.h"
#include "graphs/hooks.h"
#include "graphs/modes.h"

namespace te_graph::graphs {

namespace impl = torch::autograd::impl;

namespace {

bool have_same_names(const at::Tensor& a, const at::Tensor& b) {
    const auto may_have_names = [](const at::Tensor& tensor) {
        return tensor.unsafeGetTensorImpl()->has_named_tensor_meta();
    };
    return !(may_have_names(a) || may_have_names(b)) || a.names() == b.names();
}

// Autograd does not save tensors of inference mode for a backward; their copies in static memory would pass.
bool is_unfit_to_save(const at::Tensor& tensor) { return at::GradMode::is_enabled() && tensor.is_inference(); }

bool is_like(const at::Tensor& expected, const at::Tensor& got) {
    return has_memory(got) && got.layout() == expected.layout() && got.sizes() == expected.sizes() &&
           got.scalar_type() == expected.scalar_type() && got.device() == expected.device() &&
           got.requires_grad() == expected.requires_grad() && have_same_names(got, expected) && !is_unfit_to_save(got);
}

std::string difference(const at::Tensor& expected, const at::Tensor& got) {
    std::ostringstream words;
    if (got.layout() != expected.layout()) {
        words << " of layout " << expected.layout() << ", got " << got.layout();
    } else if (got.sizes() != expected.sizes()) {
        words << " of shape " << expected.sizes() << ", got " << got.sizes();
    } else if (got.scalar_type() != expected.scalar_type()) {
        words << " of dtype " << dtype_name(expected.scalar_type()) << ", got " << dtype_name(got.scalar_type());
    } else if (got.device() != expected.device()) {
        words << " on " << expected.device() << ", got " << got.device();
    } else if (!has_memory(got)) {
        words << " to have memory, got a wrapper or fake tensor, or one whose memory was freed";
    } else if (!have_same_names(got, expected)) {
        words << " with dimensions named " << expected.names() << ", got " << got.names();
    } else if (is_unfit_to_save(got)) {
        words << " made outside inference mode, got an inference tensor, which autograd may not save: pass a clone";
    } else {
        const auto word = [](const at::Tensor& tensor) { return tensor.requires_grad() ? "True" : "False"; };
        words << " with requires_grad=" << word(expected) << ", got requires_grad=" << word(got)
              << "; capture with a sample whose requires_grad matches that of the calls: "
              << (got.requires_grad() ? "x.detach().requires_grad_()" : "x.detach()");
    }
    return words.str();
}

}  // namespace

// Empty when the inputs are like those at capture, else what differs.
std::string GraphedCallable::difference_of_inputs(const std::vector<at::Tensor>& inputs) const {
    const std::vector<at::Tensor>& samples = slots_.front()->inputs;
    if (inputs.size() != samples.size()) return difference_of_counts(samples.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (!is_like(samples[i], inputs[i])) return "expected " + inputs_[i].name + difference(samples[i], inputs[i]);
    }
    return {};
}

// Empty unless the memory of the inputs is what a replay, which reads copies of them, would get wrong.
std::string GraphedCallable::difference_of_memory(const std::vector<at::Tensor>& inputs,
                                                  const FoundTensors& externals) const {
    for (const size_t written : written_) {
        for (size_t i = 0; i < inputs.size(); ++i) {
            if (inputs[i].is_alias_of(externals[written])) {
                return "expected " + inputs_[i].name + " not to share memory with " + guard_->tensor_name(written) +
                       ", which the callable writes; pass a clone";
            }
        }
    }
    for (const ResultSpec& spec : results_) {
        if (spec.origin != ResultSpec::Origin::kInput) continue;
        if (inputs[spec.number].strides() != slots_.front()->inputs[spec.number].strides()) {
            return "expected " + inputs_[spec.number].name +
                   " with the strides at capture, since a result is a view of it";
        }
    }
    return {};
}

bool GraphedCallable::finds_linked_inputs(const Slot& slot, const std::vector<at::Tensor>& inputs) const {
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs_[i].is_linked &&
            !(inputs[i].const_data_ptr() == slot.inputs[i].const_data_ptr() &&
              inputs[i].strides() == slot.inputs[i].strides() && inputs[i].is_neg() == slot.inputs[i].is_neg() &&
              inputs[i].is_conj() == slot.inputs[i].is_conj())) {
            return false;
        }
    }
    return true;
}

std::optional<ReplayMiss> GraphedCallable::choose_slot(const std::vector<at::Tensor>& inputs, int& slot) const {
    if (predecessor_) return choose_linked_slot(inputs, slot);
    bool is_any_free = false;
    const int count = static_cast<int>(slots_.size());
    int held = -1;
    for (slot = 0; slot < count; ++slot) {
        if (!leases_->is_free(slot)) continue;
        is_any_free = true;
        const LentStorages::Holder holder = lent_[slot]->holder(position_);
        // What is held would have to move while it may be read: by another stream, by a thread that it was given to.
        if (holder == LentStorages::Holder::kNone) return std::nullopt;
        if (holder == LentStorages::Holder::kThisThread && held < 0) held = slot;
    }
    if (held >= 0) {
        slot = held;
        return std::nullopt;
    }
    if (is_any_free) return held_elsewhere();
    return ReplayMiss{ReplayMiss::Kind::kExhausted,
                      name_ + ": a forward is called while " + std::to_string(count) +
                          (count == 1 ? " earlier one still waits for its" : " earlier ones still wait for their") +
                          " backward; capture with max_in_flight=" + std::to_string(count + 1) +
                          " or more, or run that backward (or drop its outputs) first"};
}

// Where the input lies tells the slot: results of the predecessor that are lent keep their place until overwritten.
std::optional<ReplayMiss> GraphedCallable::choose_linked_slot(const std::vector<at::Tensor>& inputs, int& slot) const {
    bool is_any_found = false;  // of tensors without elements, which lie nowhere, each slot has one
    for (slot = 0; slot < static_cast<int>(slots_.size()); ++slot) {
        if (!finds_linked_inputs(*slots_[slot], inputs)) continue;
        is_any_found = true;
        if (!leases_->is_free(slot)) continue;
        const bool is_elsewhere = lent_[slot]->holder(position_) == LentStorages::Holder::kOtherThread;
        return is_elsewhere ? std::optional(held_elsewhere()) : std::nullopt;
    }
    if (!is_any_found) {
        return ReplayMiss{
            ReplayMiss::Kind::kUnlinked,
            name_ + ": its input is not the result of its predecessor in the chain, or no longer in place"};
    }
    return ReplayMiss{ReplayMiss::Kind::kExhausted,
                      name_ +
                          ": called a second time on one result of its predecessor in the chain, while the first call "
                          "waits for its backward; run that backward first, or pass a clone, which runs eagerly"};
}

ReplayMiss GraphedCallable::held_elsewhere() const {
    return {ReplayMiss::Kind::kExhausted,
            name_ +
                ": a forward is called while other threads hold results of earlier ones, whose memory it would take; "
                "capture with max_in_flight= at least the number of threads, or drop or clone results there"};
}

// Modes that see every operation, of which a replay has none. Empty when there is none.
static const char* mode_of(const std::vector<at::Tensor>& inputs) {
    const auto has_tangent = [](const at::Tensor& tensor) {
        const auto* const meta = autograd_meta_of(tensor);
        return meta && meta->fw_grad_ && !meta->fw_grad_->empty();
    };
    if (const char* const mode = observing_mode()) return mode;
    if (std::any_of(inputs.begin(), inputs.end(), has_tangent)) return "called with a forward-mode derivative";
    return nullptr;
}

// What a checkpoint computes again ran eagerly before, and has to save the same tensors, whatever the options say.
std::optional<ReplayMiss> GraphedCallable::check_saved_tensor_hooks() const {
    const SavedTensorHooks hooks = saved_tensor_hooks();
    if (hooks == SavedTensorHooks::kNone) return std::nullopt;
    if (hooks == SavedTensorHooks::kOther) {
        return ReplayMiss{ReplayMiss::Kind::kMode,
                          name_ + ": called under torch.autograd.graph.saved_tensors_hooks, which see no replay"};
    }
    return ReplayMiss{
        hooks == SavedTensorHooks::kCheckpoint ? ReplayMiss::Kind::kCheckpoint : ReplayMiss::Kind::kMode,
        name_ +
            ": called inside activation checkpointing, where a replay would save no memory, for it keeps what its "
            "backward needs: checkpoint inside the callable (torch.utils.checkpoint in its forward)"};
}

// All that can speak against a replay, cheap things first. Nothing has been launched or changed until it has passed.
std::optional<ReplayMiss> GraphedCallable::check(PyObject* root, const std::vector<at::Tensor>& inputs,
                                                 CallableGuard::Tensors& externals, int& slot) const {
    check_groups(name_.c_str());
    const HostSteps& host_steps = slots_.front()->host_steps;  // those of all slots look at the same
    if (is_stream_capturing(device_)) return ReplayMiss{ReplayMiss::Kind::kCapturing, "inside another capture"};
    if (slots_.front()->backward) {
        if (auto miss = check_saved_tensor_hooks()) return miss;
    }
    if (const char* const mode = mode_of(inputs)) return ReplayMiss{ReplayMiss::Kind::kMode, name_ + ": " + mode};
    for (const auto& step : host_steps.of(Direction::kForward)) {
        if (const std::string obstacle = step->obstacle(); !obstacle.empty()) {
            return ReplayMiss{ReplayMiss::Kind::kMode, name_ + ": " + obstacle};
        }
    }
    if (const std::string difference = difference_of_inputs(inputs); !difference.empty()) {
        return ReplayMiss{ReplayMiss::Kind::kArguments, name_ + ": " + difference};
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs_[i].is_cast_anew && inputs[i].is_leaf()) {
            return ReplayMiss{ReplayMiss::Kind::kMode,
                              name_ + ": called with a leaf as " + inputs_[i].name +
                                  ", which autocast casts once for all its uses, as nothing that was computed"};
        }
    }
    for (const auto& step : host_steps.of(Direction::kForward)) {
        if (const std::string change = step->change(); !change.empty()) return changed(change);
    }
    if (const std::string setting = settings_.change(); !setting.empty()) return changed(setting);
    if (const std::string change = guard_->check(root, externals); !change.empty()) return changed(change);
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const auto* const meta = autograd_meta_of((*externals)[parameters_[i].tensor]);
        if (meta && meta->grad_dtype_ && *meta->grad_dtype_ != slots_.front()->parameter_grads[i].scalar_type()) {
            return changed("grad_dtype of " + guard_->tensor_name(parameters_[i].tensor) + " changed");
        }
    }
    if (const std::string difference = difference_of_memory(inputs, *externals); !difference.empty()) {
        return ReplayMiss{ReplayMiss::Kind::kDiscernible, name_ + ": " + difference};
    }
    return choose_slot(inputs, slot);
}

std::variant<std::vector<at::Tensor>, ReplayMiss> GraphedCallable::forward(PyObject* root,
                                                                           const std::vector<at::Tensor>& inputs) {
    const c10::DeviceGuard on_device(device_);
    CallableGuard::Tensors externals;
    int number = 0;
    if (auto miss = check(root, inputs, externals, number)) return *std::move(miss);

    if (has_lost_gradients_.exchange(false, std::memory_order_relaxed)) warn_of_lost_gradients();
    Slot& slot = *slots_[number];
    SlotLease lease = leases_->lease(number);
    replay_order_->enter_forward();
    slot.lent_outputs->protect(position_);
    {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < inputs.size(); ++i) {
            if (inputs_[i].is_linked) continue;
            if (lie_in_other_order(inputs[i], slot.inputs[i])) {
                note_layout(reordered_inputs_, i, inputs_[i].name, inputs[i], slot.inputs[i],
                            "Capture with samples that lie in memory as the arguments do, or call .contiguous() on "
                            "arguments");
            }
            copy_into(slot.inputs[i], inputs[i]);
        }
    }
    slot.host_steps.prepare(Direction::kForward);
    slot.host_steps.run(Direction::kForward);
    slot.forward->replay();
    ++forward_replays_;

    std::vector<at::Tensor> outputs = slot.outputs.lend(*slot.lent_outputs, position_);
    for (const size_t i : written_) impl::bump_version((*externals)[i]);
    slot.host_steps.finish(Direction::kForward);
    if (results_.empty()) {
        if (slot.backward) attach_node(std::move(lease), std::move(externals), inputs, outputs);
        return outputs;
    }
    std::vector<at::Tensor> results(results_.size());
    make_results(true, outputs, inputs, externals, results);
    if (slot.backward) attach_node(std::move(lease), externals, inputs, outputs);
    make_results(false, outputs, inputs, externals, results);
    return results;
}

void GraphedCallable::make_results(bool early, const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs, const CallableGuard::Tensors& externals,
                                   std::vector<at::Tensor>& results) const {
    for (size_t i = 0; i < results_.size(); ++i) {
        const ResultSpec& spec = results_[i];
        if (spec.is_early != early) continue;
        const at::Tensor& tensor = spec.origin == ResultSpec::Origin::kOutput  ? outputs[spec.number]
                                   : spec.origin == ResultSpec::Origin::kInput ? inputs[spec.number]
                                                                               : (*externals)[spec.number];
        results[i] = spec.view ? spec.view->of(tensor) : tensor;
    }
}

void GraphedCallable::attach_node(SlotLease lease, CallableGuard::Tensors externals,
                                  const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
    const auto [node, owner] = make_node<ReplayNode>(PendingBackward(shared_from_this(), std::move(lease)));
    node->set_label(name_);
    PendingBackward& pending = node->pending();
    const auto& use_grads = slot_of(pending).use_grads;
    torch::autograd::edge_list edges;
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs_[i].is_linked && inputs_[i].is_saved) pending.linked_inputs.emplace_back(i, inputs[i]);
        if (inputs_[i].depends_on.empty()) continue;
        const size_t uses = std::max<size_t>(1, use_grads[i].size());
        edges.insert(edges.end(), uses, impl::gradient_edge(inputs[i]));
        pending.input_edges.push_back(
            {static_cast<int>(i), inputs[i].is_leaf(), uses, false,
             c10::weak_intrusive_ptr<c10::TensorImpl>(
                 uses > 1 ? inputs[i].getIntrusivePtr()
                          : c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>())});
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const at::Tensor& parameter = (*externals)[parameters_[i].tensor];
        // What eager code has computed from the parameter gets a gradient in the same backward, perhaps: autograd then
        // sums the two before it accumulates.
        const bool is_used_outside = parameters_[i].main_grad < 0 && is_in_autograd_graph(parameter);
        if (parameters_[i].through_autograd || is_used_outside || has_gradient_hooks(parameter)) {
            edges.push_back(impl::gradient_edge(parameter));
            pending.autograd_parameters.push_back(static_cast<int>(i));
            if (parameters_[i].main_grad >= 0) note_main_grad_unused(i);
        }
    }
    // The input is there, so the node that made it stays; what is below that one may be out of reach.
    if (predecessor_ && !edges.empty()) {
        if (auto* const below = dynamic_cast<ReplayNode*>(edges.front().function.get())) below->absorb_predecessor();
    }
    node->set_next_edges(std::move(edges));
    for (const size_t i : saved_) pending.saved_versions.push_back(version_of((*externals)[i]));
    pending.externals = std::move(externals);
    if (backward_guard_) pending.functions = guard_->functions();
    for (size_t i = 0; i < outputs.size(); ++i) {
        if (saved_outputs_[i]) pending.output_versions.push_back(outputs[i].unsafeGetTensorImpl()->version_counter());
    }
    for (size_t i = 0; i < differentiable_.size(); ++i) {
        at::Tensor& output = outputs[differentiable_[i]];
        if (differentiable_.size() == 1 || inner_outputs_[i]) {
            torch::autograd::set_history(output, owner);
            continue;
        }
        const auto [result, result_owner] = make_node<ResultNode>(name_);
        result->set_next_edges({{owner, owner->add_input_metadata(output)}});
        torch::autograd::set_history(output, result_owner);
    }
    refuse_observers_of_results(*node, inner_outputs_, name_);
}

}  // namespace te_graph::graphs
