// The forward replay.
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "graph/callable.h"
#include "graph/copy.h"
#include "graph/hooks.h"
#include "graph/node_pointer.h"
#include "graph/replay_node.h"

namespace te_graph::graph {

namespace impl = torch::autograd::impl;

GraphedCallable::GraphedCallable(std::string name, at::Device device, std::shared_ptr<Scope> scope,
                                 std::shared_ptr<Guard> guard, std::vector<InputSpec> inputs,
                                 std::vector<ParameterSpec> parameters, std::vector<ExternalSpec> externals,
                                 std::vector<int> differentiable, std::vector<bool> saved_outputs)
    : name_(std::move(name)),
      device_(device),
      scope_(std::move(scope)),
      guard_(std::move(guard)),
      settings_(Settings::current(device.type())),
      inputs_(std::move(inputs)),
      parameters_(std::move(parameters)),
      externals_(std::move(externals)),
      differentiable_(std::move(differentiable)),
      saved_outputs_(std::move(saved_outputs)),
      buffers_(parameters_.size()) {}

void GraphedCallable::add_slot(std::unique_ptr<Slot> slot) {
    slots_.push_back(std::move(slot));
    pool_->add();
}

std::string GraphedCallable::describe(const std::string& change) const {
    return name_ + ": " + change + " since capture; call .te_graph.reset() on it and capture again";
}

void GraphedCallable::check_inputs(const Slot& slot, const std::vector<at::Tensor>& inputs) const {
    TORCH_CHECK_VALUE(inputs.size() == inputs_.size(), name_, ": expected ", inputs_.size(), " tensors, got ",
                      inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
        const at::Tensor& expected = slot.inputs[i];
        const at::Tensor& got = inputs[i];
        const std::string& argument = inputs_[i].name;
        TORCH_CHECK_VALUE(got.layout() == expected.layout(), name_, ": expected ", argument, " of layout ",
                          expected.layout(), ", got ", got.layout());
        TORCH_CHECK_VALUE(got.sizes() == expected.sizes(), name_, ": expected ", argument, " of shape ",
                          expected.sizes(), ", got ", got.sizes());
        TORCH_CHECK_VALUE(got.scalar_type() == expected.scalar_type(), name_, ": expected ", argument, " of dtype ",
                          expected.scalar_type(), ", got ", got.scalar_type());
        TORCH_CHECK_VALUE(got.device() == expected.device(), name_, ": expected ", argument, " on ", expected.device(),
                          ", got ", got.device());
        TORCH_CHECK_VALUE(got.requires_grad() == expected.requires_grad(), name_, ": expected ", argument,
                          " with requires_grad=", expected.requires_grad() ? "True" : "False",
                          ", got requires_grad=", got.requires_grad() ? "True" : "False");
    }
}

std::optional<std::vector<at::Tensor>> GraphedCallable::forward(PyObject* root, const std::vector<at::Tensor>& inputs) {
    const c10::DeviceGuard on_device(device_);
    if (is_capturing(device_)) return std::nullopt;

    // Checks: nothing has been launched or changed until they have passed.
    const std::string setting = settings_.difference(Settings::current(device_.type()));
    TORCH_CHECK(setting.empty(), describe(setting));
    std::vector<at::Tensor> externals;
    const std::string change = guard_->check(root, externals);
    TORCH_CHECK(change.empty(), describe(change));
    check_inputs(*slots_.front(), inputs);
    const int number = pool_->first_free();
    TORCH_CHECK(number >= 0, name_, ": a forward is called while ", pool_->size(),
                " earlier ones still wait for their backward; capture with max_in_flight=", pool_->size() + 1,
                " or more, or run that backward (or drop its outputs) first");

    Slot& slot = *slots_[number];
    SlotLease lease = pool_->lease(number);
    scope_->enter();
    slot.lent_outputs.protect();
    {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < inputs.size(); ++i) copy_into(slot.inputs[i], inputs[i]);
    }
    slot.forward->replay();
    ++forward_replays_;

    std::vector<at::Tensor> outputs = slot.outputs.hand_out(slot.lent_outputs);
    for (size_t i = 0; i < externals.size(); ++i) {
        if (externals_[i].written) impl::bump_version(externals[i]);
    }
    if (slot.backward) attach_node(std::move(lease), std::move(externals), inputs, outputs);
    return outputs;
}

void GraphedCallable::attach_node(SlotLease lease, std::vector<at::Tensor> externals,
                                  const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs) {
    const auto [node, owner] = make_node<ReplayNode>(shared_from_this(), std::move(lease));
    torch::autograd::edge_list edges;
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs_[i].depends_on.empty()) continue;
        edges.push_back(impl::gradient_edge(inputs[i]));
        node->input_edges.push_back(static_cast<int>(i));
        node->leaf_inputs.push_back(inputs[i].is_leaf());
    }
    for (const ParameterSpec& spec : parameters_) {
        const at::Tensor& parameter = externals[spec.tensor];
        const bool edge = spec.through_autograd || has_gradient_hooks(parameter);
        if (edge) edges.push_back(impl::gradient_edge(parameter));
        node->through_autograd.push_back(edge);
    }
    node->set_next_edges(std::move(edges));
    for (const auto& external : externals) {
        node->external_versions.push_back(external.is_inference() ? 0 : external._version());
    }
    node->externals = std::move(externals);
    for (const auto& output : outputs) {
        node->output_versions.push_back(output.unsafeGetTensorImpl()->version_counter());
    }
    for (const int output : differentiable_) torch::autograd::set_history(outputs[output], owner);
}

}  // namespace te_graph::graph
