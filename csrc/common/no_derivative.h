// What autograd follows, and the ops that have no derivative.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

namespace te_graph {

// Whether `tensor` [...] has a tangent of forward-mode differentiation.
inline bool has_tangent(const at::Tensor& tensor) { return tensor.defined() && tensor._fw_grad(0).defined(); }

// Whether `tensor` is the result of an op that autograd recorded, which matters where it records (`is_recorded`), or
// has a tangent.
inline bool is_followed(c10::TensorImpl& tensor, bool is_recorded) {
    const auto* const meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
    if (meta == nullptr) return false;
    return (is_recorded && meta->grad_fn_ != nullptr) || (meta->fw_grad_ != nullptr && !meta->fw_grad_->empty());
}

// The Autograd kernel. A result says so in the backward, where a gradient is asked of it. Refused are tangents,
// which would be lost, and tensors that are written while autograd follows them: their history would stay what it was,
// and gradients be those of the values before.
torch::CppFunction no_derivative();

}  // namespace te_graph
