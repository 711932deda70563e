// The part of a flat buffer in which the gradient of a parameter lies, whoever computes it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "common/autograd_meta.h"
#include "common/main_grad_reset.h"

namespace te_graph {

// Autograd meets it as a hook on the parameter. What accumulates gradients without autograd looks for it.
class GradView {
public:
    virtual ~GradView() = default;
    // In a backward, before it writes to the memory.
    virtual void enter_backward() = 0;
    // What has written to it has been launched.
    virtual void note_accumulated() = 0;
    // Whether that is awaited, so that it should be told as soon as it is so.
    virtual bool is_awaited() const = 0;
    // [...] like the parameter.
    virtual const at::Tensor& memory() const = 0;
    // Of the parameter's main_grad, which the memory is; null where it is .grad.
    virtual const std::shared_ptr<MainGradReset>& main_grad_reset() const = 0;
    // What is or has been .grad over the memory keeps its values: it is about to be overwritten.
    virtual void protect() = 0;
    // A new .grad [...] over the memory, which the caller overwrites.
    virtual at::Tensor renew() = 0;
    // What autograd shall accumulate of grads: one [...], or undefined.
    virtual torch::autograd::variable_list receive(const torch::autograd::variable_list& grads) = 0;
};

struct GradViewHook final : torch::autograd::FunctionPreHook {
    explicit GradViewHook(std::shared_ptr<GradView> view) : view(std::move(view)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
        return view->receive(grads);
    }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
        TORCH_CHECK_NOT_IMPLEMENTED(false,
                                    "FlatParameters: expected a backward that autograd runs itself, got one under "
                                    "compiled autograd, which would not know where gradients lie");
    }
    const std::shared_ptr<GradView> view;
};

// That of a leaf, or null.
inline GradView* grad_view_of(const torch::autograd::AutogradMeta& leaf) {
    for (const auto& hook : leaf.hooks_) {
        if (const auto* const own = dynamic_cast<const GradViewHook*>(hook.get())) return own->view.get();
    }
    return nullptr;
}
// leaf: [...].
inline GradView* grad_view_of(const at::Tensor& leaf) {
    const torch::autograd::AutogradMeta* const meta = autograd_meta_of(leaf);
    return meta ? grad_view_of(*meta) : nullptr;
}

}  // namespace te_graph
