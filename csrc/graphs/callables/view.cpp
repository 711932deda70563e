#include "graphs/callables/view.h"

#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>

namespace te_graph::graphs {

namespace impl = torch::autograd::impl;
using torch::autograd::CreationMeta;

namespace {

const torch::autograd::DifferentiableViewMeta* backward_view_of(const at::Tensor& tensor) {
    const auto* const meta = impl::get_view_autograd_meta(tensor);
    return meta && meta->has_bw_view() ? meta : nullptr;
}

}  // namespace

bool View::is_differentiable(const at::Tensor& tensor, const at::Tensor& base) {
    const auto* const meta = backward_view_of(tensor);
    if (!meta || !meta->get_backward_view().base_.is_same(base)) return false;
    const CreationMeta creation = meta->get_creation_meta();
    return creation == CreationMeta::DEFAULT || creation == CreationMeta::NO_GRAD_MODE;
}

bool View::is_possible(const at::Tensor& tensor, const at::Tensor& base) {
    if (is_differentiable(tensor, base)) return true;
    return !tensor.requires_grad() && tensor.is_alias_of(base) && tensor.scalar_type() == base.scalar_type() &&
           tensor.is_conj() == base.is_conj() && tensor.is_neg() == base.is_neg();
}

View::View(const at::Tensor& tensor, const at::Tensor& base)
    : is_detached_(!is_differentiable(tensor, base)),
      sizes_(tensor.sizes().begin(), tensor.sizes().end()),
      strides_(tensor.strides().begin(), tensor.strides().end()),
      offset_(tensor.storage_offset() - base.storage_offset()) {
    TORCH_CHECK(is_possible(tensor, base), "te_graph: View: expected a view of the base");
    if (is_detached_) return;
    const auto& made = backward_view_of(tensor)->get_backward_view();
    if (made.has_view_fn()) function_ = made.view_fn().clone_and_set();
}

at::Tensor View::of(const at::Tensor& base) const {
    if (function_) return (*function_)(base);
    const at::Tensor from = is_detached_ ? base.detach() : base;
    const bool is_whole = offset_ == 0 && from.sizes() == sizes_ && from.strides() == strides_;
    if (is_whole && is_detached_) return from;
    return at::as_strided(from, sizes_, strides_, base.storage_offset() + offset_);
}

}  // namespace te_graph::graphs
