// The backward replay: gradients in, one graph launch, .grad as eager execution would leave it.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "graph/callable.h"
#include "graph/copy.h"
#include "graph/gradient_plan.h"
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

// What is left to do for one parameter once the graph has been launched.
struct GraphedCallable::Pending {
    GradientAction action = GradientAction::kNothing;
    at::Tensor destination;  // the tensor that the table writes; undefined when it writes none
};

void GraphedCallable::check_versions(const ReplayNode& node) const {
    for (size_t i = 0; i < externals_.size(); ++i) {
        const at::Tensor& external = node.externals[i];
        if (!externals_[i].saved || external.is_inference()) continue;
        TORCH_CHECK(external._version() == node.external_versions[i], name_, ": ", guard_->tensor_name(i),
                    " is needed for backward and has been modified by an inplace operation since the forward: it is at "
                    "version ",
                    external._version(), "; expected version ", node.external_versions[i]);
    }
    for (const LinkedInput& linked : node.linked_inputs) {
        TORCH_CHECK(linked.version.current_version() == linked.version_at_forward, name_, ": ",
                    inputs_[linked.input].name,
                    " is needed for backward and has been modified by an inplace operation since the forward");
    }
    for (size_t i = 0; i < saved_outputs_.size(); ++i) {
        TORCH_CHECK(!saved_outputs_[i] || node.output_versions[i].current_version() == 0, name_, ": output ", i,
                    " is needed for backward and has been modified by an inplace operation");
    }
}

// Puts the gradients of the outputs where the graph reads them; returns which outputs got one. What is in place is let
// go of at once, so that memory lent by the graph that made it is known to be free again.
std::vector<bool> GraphedCallable::load_grad_outputs(Slot& slot, variable_list& grads) const {
    const auto load = [](Staging& staging, at::Tensor& grad) {
        if (grad.defined()) {
            copy_into(staging.tensor, grad);
            grad.reset();
            staging.is_zero = false;
        } else if (!staging.is_zero) {
            staging.tensor.zero_();
            staging.is_zero = !staging.is_lent;
        }
    };
    std::vector<bool> got(grads.size());
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

std::vector<GraphedCallable::Pending> GraphedCallable::plan_parameters(Slot& slot, const ReplayNode& node,
                                                                       const std::vector<bool>& got) const {
    const auto* const exec_info = torch::autograd::get_current_graph_task_exec_info();
    const bool inputs_only = exec_info && !exec_info->empty();
    std::vector<Pending> pending(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const ParameterSpec& spec = parameters_[i];
        const at::Tensor& parameter = node.externals[spec.tensor];
        const at::Tensor& source = slot.parameter_grads[i];
        const at::Tensor& grad = parameter.grad();
        const auto action = plan_gradient({.reached = any_common(spec.depends_on, got),
                                           .inputs_only = inputs_only,
                                           .through_autograd = node.through_autograd[i],
                                           .has_main_grad = spec.main_grad >= 0,
                                           .overwrite_main_grad = spec.flag && spec.flag->overwrite,
                                           .has_grad = grad.defined(),
                                           .grad_fits = grad.defined() && fits(grad, source, source.scalar_type())});
        pending[i].action = action;
        switch (action) {
            case GradientAction::kNothing:
            case GradientAction::kReturn:
            case GradientAction::kAddEagerly:
                break;
            case GradientAction::kStoreNew:
                pending[i].destination = is_ours_alone(buffers_[i])
                                             ? buffers_[i]
                                             : at::empty_strided(source.sizes(), source.strides(), source.options());
                break;
            case GradientAction::kAddInPlace:
                pending[i].destination = grad;
                break;
            case GradientAction::kStoreMainGrad:
            case GradientAction::kAddMainGrad:
                pending[i].destination = node.externals[spec.main_grad];
                break;
        }
    }
    separate_overlapping(pending);
    for (size_t i = 0; i < slot.table->size(); ++i) {
        const auto& [action, destination] = pending[i];
        const bool stores = action == GradientAction::kStoreNew || action == GradientAction::kStoreMainGrad;
        const Mode mode = !destination.defined() ? Mode::kSkip : stores ? Mode::kStore : Mode::kAdd;
        slot.table->set(i, mode, destination.defined() ? destination.mutable_data_ptr() : nullptr);
    }
    return pending;
}

// One launch may not write the same memory twice. Gradients that the user has put into common memory are added one
// after the other; gradients that we allocated cannot be.
void GraphedCallable::separate_overlapping(std::vector<Pending>& pending) const {
    bool has_foreign = false;
    std::vector<size_t> written;
    for (size_t i = 0; i < pending.size(); ++i) {
        if (!pending[i].destination.defined()) continue;
        written.push_back(i);
        has_foreign |= !pending[i].destination.is_same(buffers_[i]);
    }
    if (!has_foreign) return;
    const auto before = [&](size_t a, size_t b) {
        return extent(pending[a].destination) < extent(pending[b].destination);
    };
    std::sort(written.begin(), written.end(), before);
    const char* end = nullptr;
    for (const size_t i : written) {
        const auto [from, to] = extent(pending[i].destination);
        if (from < end && pending[i].action == GradientAction::kAddInPlace) {
            pending[i] = {GradientAction::kAddEagerly, {}};
        } else {
            end = std::max(end, to);
        }
    }
}

variable_list GraphedCallable::backward(ReplayNode& node, variable_list grads) {
    const c10::DeviceGuard on_device(device_);
    Slot& slot = *slots_[node.slot()];
    const std::string change = guard_->check_tensors(node.externals);
    TORCH_CHECK(change.empty(), changed(change).message);
    check_versions(node);

    scope_->enter();
    const std::vector<bool> got = load_grad_outputs(slot, grads);
    const std::vector<Pending> pending = plan_parameters(slot, node, got);
    slot.table->upload();
    scope_->input_gradients().protect();
    slot.backward->replay();
    ++backward_replays_;

    variable_list results;
    const auto lent = slot.grad_inputs.hand_out(scope_->input_gradients());
    for (size_t i = 0; i < node.input_edges.size(); ++i) {
        const int input = node.input_edges[i];
        if (!any_common(inputs_[input].depends_on, got)) {
            results.emplace_back();
        } else {
            // A leaf keeps what it gets as .grad, which must not move under its holder.
            results.push_back(node.leaf_inputs[i] ? lent[input].clone() : lent[input]);
        }
    }
    bool wrote_gradients = false;
    for (size_t i = 0; i < parameters_.size(); ++i) {
        const at::Tensor& parameter = node.externals[parameters_[i].tensor];
        const Pending& done = pending[i];
        wrote_gradients |= done.destination.defined();
        switch (done.action) {
            case GradientAction::kStoreNew:
                buffers_[i] = done.destination;
                parameter.mutable_grad() = done.destination;
                break;
            case GradientAction::kAddEagerly:
                parameter.mutable_grad().add_(slot.parameter_grads[i]);
                wrote_gradients = true;
                break;
            case GradientAction::kStoreMainGrad:
                parameters_[i].flag->overwrite = false;
                [[fallthrough]];
            case GradientAction::kAddInPlace:
            case GradientAction::kAddMainGrad:
                impl::bump_version(done.destination);
                break;
            case GradientAction::kNothing:
            case GradientAction::kReturn:
                break;
        }
        if (node.through_autograd[i]) {
            results.push_back(done.action == GradientAction::kReturn ? slot.parameter_grads[i].clone() : at::Tensor());
        }
    }
    if (wrote_gradients) sync_backward_caller(device_);
    return results;
}

}  // namespace te_graph::graph
