// The backward of FP8 products in a row.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <string>
#include <vector>

#include "fp8/fused_products.h"
#include "fp8/product_backward.h"

namespace te_graph::fp8 {

class FusedBackward final : public torch::autograd::Node {
public:
    // What a stage keeps. Gradients are results in this order: of x, of the residual, and for each stage of the norm's
    // weight and bias, if it has a norm, and of the product's weight and bias.
    struct Stage {
        ProductBackward product;
        std::optional<FusedNorm> norm;  // without its tensors
        std::optional<FusedActivation> activation;
        at::ScalarType input_dtype;  // of what the producer takes, and gives
        size_t first_edge;           // of the norm, or the product
        // The norm's s [M, I], weight [I], mean [M] or undefined, rstd [M]; or the activation's input [M, I or 2 I].
        std::vector<torch::autograd::SavedVariable> saved;

        size_t weight_edge() const { return first_edge + (norm ? 2 : 0); }
        size_t bias_edge() const { return weight_edge() + 1; }
    };
    FusedBackward(std::vector<Stage> stages, std::vector<int64_t> x_sizes,
                  std::optional<std::vector<int64_t>> residual_sizes)
        : stages_(std::move(stages)),
          x_sizes_(std::move(x_sizes)),
          has_residual_(residual_sizes.has_value()),
          residual_sizes_(std::move(residual_sizes).value_or(std::vector<int64_t>())) {}

    static constexpr size_t kX = 0, kResidual = 1, kFirstOfStages = 2;
    std::vector<Stage>& stages() { return stages_; }

    // gradients: of y [..., O], and of s [..., H].
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

    void release_variables() override;
    std::string name() const override { return "te_graph::FusedBackward"; }

private:
    struct StageRun;
    struct CastGrad;
    // Whether a gradient is asked for that the input of stage i is needed for, or anything of its product.
    bool needs_input(size_t i) const;
    bool is_asked(size_t i) const;
    StageRun begin(size_t i);
    // grad: [...], what the ops read.
    void find_memory(size_t i, StageRun& run, const at::Tensor& grad) const;
    // The parts of a backward: each puts the gradients of its parameters into `results`, [...] each.
    // grad: [M, O], of the result of the last product; results: [...] -> [M, I], of its input.
    at::Tensor last_product(StageRun& run, const at::Tensor& grad, torch::autograd::variable_list& results);
    // results: [...] -> [M, I], of the input of a product before.
    at::Tensor product(size_t i, StageRun& run, const CastGrad& grad, torch::autograd::variable_list& results);
    // below: [M, I], of the result of the activation of stage i -> what the product before gets.
    CastGrad activation(size_t i, const StageRun& run, StageRun& before, const at::Tensor& below);
    // below: [M, I], of the result of the norm of stage i; grad_sum: [M, I], of s, or none; before: of the product
    // before, or null; results: [...] -> what that gets.
    CastGrad norm(size_t i, const StageRun& run, StageRun* before, const at::Tensor& below,
                  const std::optional<at::Tensor>& grad_sum, torch::autograd::variable_list& results);

    std::vector<Stage> stages_;
    const std::vector<int64_t> x_sizes_;
    const bool has_residual_;
    const std::vector<int64_t> residual_sizes_;
    bool is_released_ = false;
};

}  // namespace te_graph::fp8
