// The backward of a linear layer's FP8 products.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <memory>
#include <string>

#include "common/host_steps.h"
#include "fp8/linear_products.h"

namespace te_graph::fp8 {

class LinearBackward final : public torch::autograd::Node {
public:
    LinearBackward(std::shared_ptr<LinearProducts> products, std::shared_ptr<HostSteps> steps, at::ScalarType x_dtype,
                   at::ScalarType weight_dtype)
        : products_(std::move(products)), steps_(std::move(steps)), x_dtype_(x_dtype), weight_dtype_(weight_dtype) {}

    // weight_t: [I, O], for the gradient of x; x_t [I, padded(M)] and x_scale_inv [1], for that of the weight.
    void save(const at::Tensor& weight_t, const at::Tensor& x_t, const at::Tensor& x_scale_inv);

    // gradients: [..., O] -> [..., I], [O, I] or [I, O], [O].
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

    void release_variables() override;
    std::string name() const override { return "te_graph::LinearBackward"; }

private:
    // [I, O] or undefined: weight_t, as it was in the forward.
    at::Tensor unpack_weight_t();

    const std::shared_ptr<LinearProducts> products_;
    const std::shared_ptr<HostSteps> steps_;
    const at::ScalarType x_dtype_, weight_dtype_;
    const int64_t casts_ = products_->casts();  // of the weight by the time of the forward
    std::array<torch::autograd::SavedVariable, 3> saved_;
    bool is_released_ = false;
};

}  // namespace te_graph::fp8
