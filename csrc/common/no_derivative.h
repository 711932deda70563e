// What autograd follows, and the ops that have no derivative.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/library.h>

#include "common/autograd_meta.h"

namespace te_graph {

// Whether forward-mode differentiation is under way. Where it is not, no tensor has a tangent.
inline bool is_forward_mode() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

// Whether `tensor` [...] has a tangent of forward-mode differentiation.
inline bool has_tangent(const at::Tensor& tensor) { return tensor.defined() && tensor._fw_grad(0).defined(); }

// Whether autograd recorded the op whose result this is. A view learns of what was recorded for its base after it was
// made no sooner than it is asked for its grad_fn.
inline bool has_history(const torch::autograd::AutogradMeta& meta) {
    if (meta.grad_fn_ != nullptr) return true;
    if (!meta.is_view_) return false;
    const auto& view = static_cast<const torch::autograd::DifferentiableViewMeta&>(meta);
    if (!view.has_bw_view()) return false;
    const auto* const base = autograd_meta_of(view.get_backward_view().base_);
    return base != nullptr && base->grad_fn_ != nullptr;
}

// Whether `tensor` is the result of an op that autograd recorded, which matters where it records (`is_recorded`), or
// has a tangent.
inline bool is_followed(c10::TensorImpl& tensor, bool is_recorded) {
    const auto* const meta = autograd_meta_of(tensor);
    if (meta == nullptr) return false;
    return (is_recorded && has_history(*meta)) || (meta->fw_grad_ != nullptr && !meta->fw_grad_->empty());
}

// Raises if `argument` of `op`, a tensor [...], has a tangent.
void check_no_tangent(const char* op, const char* argument, const at::Tensor& tensor);

// Raises if autograd follows `argument` of `op`: a tensor [...] that has a tangent, and one that requires a gradient
// and is written while gradients are recorded. Returns whether it requires one that is recorded.
bool check_not_followed(const char* op, const char* argument, const at::Tensor& tensor, bool is_written);

// The Autograd kernel. A result says so in the backward, where a gradient is asked of it. Refused are tangents,
// which would be lost, and tensors that are written while autograd follows them: their history would stay what it was,
// and gradients be those of the values before.
torch::CppFunction no_derivative();

}  // namespace te_graph
