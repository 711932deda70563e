#include "fp8/linear_backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "common/check.h"
#include "common/own_op.h"
#include "fp8/gemm.h"

namespace te_graph::fp8 {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

constexpr size_t kNoAlignment = 1;

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// tensor: [...] or undefined.
MaybeTensor maybe(const at::Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : std::nullopt; }

// Where a gradient [...] goes by itself.
MaybeTensor memory_of(const std::optional<ParameterGrad>& grad) {
    return grad ? MaybeTensor(grad->memory) : std::nullopt;
}

}  // namespace

// weight_t: [I, O]; x_t: [I, padded(M)]; x_scale_inv: [1].
void LinearBackward::save(const at::Tensor& weight_t, const at::Tensor& x_t, const at::Tensor& x_scale_inv) {
    saved_ = {SavedVariable(weight_t, false), SavedVariable(x_t, false), SavedVariable(x_scale_inv, false)};
}

void LinearBackward::release_variables() {
    const std::lock_guard lock(mutex_);
    for (SavedVariable& saved : saved_) saved.reset_data();
    is_released_ = true;
}

at::Tensor LinearBackward::unpack_weight_t() {
    constexpr const char* kOtherCast =
        "te_graph.Linear: the weight was cast again between this forward and its backward (it changed, or another "
        "recipe or the optimizer came in between), and there is one cast of a weight: run the backward before";
    at::Tensor weight_t;
    try {
        weight_t = saved_[0].unpack();
    } catch (const c10::Error& error) {
        TORCH_CHECK(false, kOtherCast, " (", error.what_without_backtrace(), ")");
    }
    // A hook may have kept a copy, which has no version that shows that the scale is that of another cast.
    const bool is_copy = weight_t.defined() && !weight_t.is_alias_of(products_->weight_t_);
    TORCH_CHECK(!is_copy || products_->casts() == casts_, kOtherCast);
    return weight_t;
}

variable_list LinearBackward::apply(variable_list&& gradients) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
    if (!gradients[0].defined()) return variable_list(3);
    // Gradients of gradients also pass through x and the weight, whose casts have none: results say so when one is
    // asked of them, whether or not they are recorded for the sake of the gradient.
    const bool must_be_followed = at::GradMode::is_enabled() && !gradients[0].requires_grad();
    const at::Tensor grad = must_be_followed ? gradients[0].detach().requires_grad_() : gradients[0];
    const std::array<bool, 3> mask{task_should_compute_output(0), task_should_compute_output(1),
                                   task_should_compute_output(2)};
    products_->grad_column_.begin_cast(steps_.get(), Direction::kBackward);
    static const auto op =
        own_op<Three(const at::Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                     const MaybeTensor&, const MaybeTensor&, at::ScalarType, at::ScalarType, at::ScalarType,
                     std::array<bool, 3>, const MaybeTensor&, bool, const MaybeTensor&, bool, bool)>(
            "te_graph::fp8_linear_backward");
    // What hooks of saved tensors run, as a checkpoint's recomputation, is no part of the call.
    const MaybeTensor weight_t = maybe(unpack_weight_t()), x_t = maybe(saved_[1].unpack()),
                      x_scale_inv = maybe(saved_[2].unpack());
    // Where nothing is followed, autograd's part, some of the call's time on the host, is left out.
    const bool is_followed = at::GradMode::is_enabled();
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!is_followed) below.emplace();
    std::optional<ParameterGrad> of_weight, of_bias;
    // What looks at the results of the node is to find them.
    const bool is_looked_at = !post_hooks().empty() || (torch::autograd::AnomalyMode::is_enabled() &&
                                                        torch::autograd::AnomalyMode::should_check_nan());
    const bool may_add = !is_followed && !is_looked_at;
    if (mask[1] && may_add) {
        of_weight = ParameterGrad::find(next_edge(1), products_->weight_sizes(), weight_dtype_, kGemmAlignment, grad,
                                        steps_.get(), products_->main_grad_of_);
    }
    if (mask[2] && may_add) {
        of_bias = ParameterGrad::find(next_edge(2), {grad.size(-1)}, grad.scalar_type(), kNoAlignment, grad,
                                      steps_.get(), {});
    }
    auto [grad_x, grad_weight, grad_bias] =
        op.call(grad, weight_t, products_->weight_scale_inv_, x_t, x_scale_inv, products_->grad_column_.scale,
                products_->grad_column_.amax, products_->grad_dtype_, x_dtype_,
                of_weight ? of_weight->memory.scalar_type() : weight_dtype_, mask, memory_of(of_weight),
                of_weight && of_weight->accumulate, memory_of(of_bias), of_bias && of_bias->accumulate,
                products_->inputs_first_);
    products_->grad_column_.end_cast(steps_.get(), Direction::kBackward);
    if (of_weight) grad_weight = of_weight->finish();
    if (of_bias) grad_bias = of_bias->finish();
    return {std::move(grad_x), std::move(grad_weight), std::move(grad_bias)};
}

}  // namespace te_graph::fp8
