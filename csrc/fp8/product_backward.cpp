#include "fp8/product_backward.h"

#include <torch/csrc/autograd/anomaly_mode.h>

#include "common/own_op.h"
#include "fp8/gemm.h"

namespace te_graph::fp8 {

using torch::autograd::SavedVariable;

bool is_looked_at(const torch::autograd::Node& node) {
    return !node.post_hooks().empty() ||
           (torch::autograd::AnomalyMode::is_enabled() && torch::autograd::AnomalyMode::should_check_nan());
}

// weight_t: [I, O]; x_t: [I, padded(M)]; x_scale_inv: [1].
void ProductBackward::save(const at::Tensor& weight_t, const at::Tensor& x_t, const at::Tensor& x_scale_inv) {
    saved_ = {SavedVariable(weight_t, false), SavedVariable(x_t, false), SavedVariable(x_scale_inv, false)};
}

void ProductBackward::release() {
    for (SavedVariable& saved : saved_) saved.reset_data();
}

at::Tensor ProductBackward::unpack_weight_t() {
    constexpr const char* kOtherCast =
        "te_graph.Linear: the weight was cast again between this forward and its backward (it changed, or another "
        "recipe or the optimizer came in between, or it is a new tensor at each call, as hooks of "
        "torch.nn.utils.prune, weight_norm and spectral_norm or torch.func.functional_call give it), and there is one "
        "cast of a weight: run the backward before, or call the layer once with all inputs";
    at::Tensor weight_t;
    try {
        weight_t = saved_[0].unpack();
    } catch (const c10::Error& error) {
        TORCH_CHECK(false, kOtherCast, " (", error.what_without_backtrace(), ")");
    }
    // A hook may have kept a copy, which has no version that shows that the scale is that of another cast.
    const bool is_copy = weight_t.defined() && !weight_t.is_alias_of(products_->weight_t_);
    TORCH_CHECK(!is_copy || products_->cast_number() == cast_number_, kOtherCast);
    return weight_t;
}

ProductBackward::Run ProductBackward::begin() {
    products_->grad_column_.begin_cast(steps_.get(), Direction::kBackward);
    const at::Tensor weight_t = unpack_weight_t();
    return {if_defined(weight_t), if_defined(saved_[1].unpack()), if_defined(saved_[2].unpack()), {}, {},
            weight_dtype_};
}

// grad: [...].
void ProductBackward::find_memory(Run& run, const at::Tensor& grad, const torch::autograd::Edge* weight,
                                  const torch::autograd::Edge* bias) const {
    if (weight != nullptr) {
        run.weight = ParameterGrad::find(*weight, products_->weight_sizes(), weight_dtype_, kGemmAlignment, grad,
                                         steps_.get(), products_->main_grad_of_);
        if (run.weight) run.weight_dtype = run.weight->memory.scalar_type();
    }
    if (bias != nullptr) {
        run.bias = ParameterGrad::find(*bias, {products_->weight_.size(0)}, grad.scalar_type(), kAnywhere, grad,
                                       steps_.get(), {});
    }
}

// grad: [..., O] -> [..., I], [O, I] or [I, O], [O].
std::tuple<at::Tensor, at::Tensor, at::Tensor> ProductBackward::multiply(const Run& run, const at::Tensor& grad,
                                                                         at::ScalarType x_dtype,
                                                                         std::array<bool, 3> output_mask) const {
    static const auto op = own_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
        const MaybeTensor&, const MaybeTensor&, at::ScalarType, at::ScalarType, at::ScalarType, std::array<bool, 3>,
        const MaybeTensor&, bool, const MaybeTensor&, bool, bool)>("te_graph::fp8_linear_backward");
    return op.call(grad, run.weight_t, products_->weight_scale_inv(), run.x_t, run.x_scale_inv, column().scale,
                   column().amax, grad_dtype(), x_dtype, run.weight_dtype, output_mask, run.weight_memory(),
                   run.accumulates_weight(), run.bias_memory(), run.accumulates_bias(), products_->inputs_first());
}

// grad_weight: [O, I] or [I, O]; grad_bias: [O].
std::pair<at::Tensor, at::Tensor> ProductBackward::end(Run& run, at::Tensor grad_weight, at::Tensor grad_bias) {
    products_->grad_column_.end_cast(steps_.get(), Direction::kBackward);
    if (run.weight) grad_weight = run.weight->finish();
    if (run.bias) grad_bias = run.bias->finish();
    return {std::move(grad_weight), std::move(grad_bias)};
}

}  // namespace te_graph::fp8
