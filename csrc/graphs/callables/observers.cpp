#include "graphs/callables/observers.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>

namespace te_graph::graphs {

namespace {

using torch::autograd::FunctionPreHook;
using torch::autograd::Node;

// The output that a hook on a tensor observes, or nothing when it does not tell.
std::optional<size_t> observed_by(const FunctionPreHook& hook) {
    // Known by its name: torch does not export the type.
    const bool is_python = std::strstr(typeid(hook).name(), "PyFunctionTensorPreHook") != nullptr;
    if (!is_python) return std::nullopt;
    return static_cast<const torch::autograd::PyFunctionTensorPreHook&>(hook).value_idx;
}

// Comes before all hooks on what `node` made, also where the node itself is not run.
class ObserverCheck final : public FunctionPreHook {
public:
    using Words = std::function<std::string(size_t)>;  // for an output that is observed

    ObserverCheck(Node& node, std::vector<bool> inner, Words words)
        : node_(node), inner_(std::move(inner)), words_(std::move(words)) {}

    torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
        for (const auto& hook : node_.tensor_pre_hooks()) {
            if (!dynamic_cast<const ObserverCheck*>(hook.get())) check(observed_by(*hook));
        }
        for (const auto& [output, hook] : node_.retains_grad_hooks()) check(output);
        check_captures();
        return grads;
    }

private:
    void check(std::optional<size_t> output) const {
        for (size_t i = 0; i < inner_.size(); ++i) {
            TORCH_CHECK(!inner_[i] || (output && *output != i), words_(i));
        }
    }

    void check_captures() const {
        const auto* const exec_info = torch::autograd::get_current_graph_task_exec_info();
        if (!exec_info) return;
        const auto asked = exec_info->find(&node_);
        if (asked == exec_info->end() || !asked->second.captures_) return;
        for (const auto& capture : *asked->second.captures_) check(capture.input_idx_);
    }

    Node& node_;  // owns this
    const std::vector<bool> inner_;
    const Words words_;
};

}  // namespace

void refuse_observers_of_results(Node& node, const std::vector<bool>& inner, const std::string& label) {
    if (std::find(inner.begin(), inner.end(), true) == inner.end()) return;
    const auto words = [label](size_t output) {
        return label + ": result " + std::to_string(output) +
               " has a hook, retains its gradient or is an input of torch.autograd.grad, and another result is "
               "computed from it inside the graph, where that part of its gradient is not seen: let the callable "
               "return a clone of it";
    };
    node.add_tensor_pre_hook(std::make_unique<ObserverCheck>(node, inner, words));
}

void refuse_observers_of_argument(const at::Tensor& tensor, const std::string& name) {
    const auto node = tensor.grad_fn();
    if (!node) return;
    std::vector<bool> inner(tensor.output_nr() + 1);
    inner.back() = true;
    const auto words = [name](size_t) {
        return name +
               ", which the call changed in place, has a hook that was put on it since, retains its gradient or is an "
               "input of torch.autograd.grad, and a result is computed from it inside the graph, where that part of "
               "its gradient is not seen: pass a clone, and do that with the result of an operation on it";
    };
    node->add_tensor_pre_hook(std::make_unique<ObserverCheck>(*node, std::move(inner), words));
}

}  // namespace te_graph::graphs
