// The backward of a linear layer's FP8 products.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <string>

#include "fp8/product_backward.h"

namespace te_graph::fp8 {

class LinearBackward final : public torch::autograd::Node {
public:
    LinearBackward(ProductBackward product, at::ScalarType x_dtype) : product_(std::move(product)), x_dtype_(x_dtype) {}

    // gradients: [..., O] -> [..., I], [O, I] or [I, O], [O].
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

    void release_variables() override;
    std::string name() const override { return "te_graph::LinearBackward"; }

private:
    ProductBackward product_;
    const at::ScalarType x_dtype_;
    bool is_released_ = false;
};

}  // namespace te_graph::fp8
