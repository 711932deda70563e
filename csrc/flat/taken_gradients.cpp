#include "flat/taken_gradients.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace te_graph::flat {

namespace impl = torch::autograd::impl;
using torch::autograd::variable_list;

namespace {

// Runs before the accumulation: after it another backward could add to .grad before this hook reads it.
struct TakeGradientHook final : torch::autograd::FunctionPreHook {
    TakeGradientHook(const at::Tensor& leaf, std::function<void(at::Tensor)> take)
        : leaf_(leaf.getIntrusivePtr()), take_(std::move(take)) {}

    variable_list operator()(const variable_list& grads) override {
        auto leaf = leaf_.lock();
        if (!leaf || !grads.front().defined() || !accumulates_into(at::Tensor(std::move(leaf)))) return grads;
        take_(grads.front());
        return {at::Tensor()};
    }

private:
    const c10::weak_intrusive_ptr<c10::TensorImpl> leaf_;  // which owns this
    const std::function<void(at::Tensor)> take_;
};

}  // namespace

bool accumulates_into(const at::Tensor& leaf) {
    const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
    if (asked == nullptr || asked->empty()) return true;
    const auto accumulator = impl::try_get_grad_accumulator(leaf);
    const auto found = accumulator ? asked->find(accumulator.get()) : asked->end();
    return found != asked->end() && found->second.needed_;
}

void take_gradients(const at::Tensor& leaf, std::function<void(at::Tensor)> take) {
    impl::hooks(leaf).push_back(std::make_unique<TakeGradientHook>(leaf, std::move(take)));
}

}  // namespace te_graph::flat
