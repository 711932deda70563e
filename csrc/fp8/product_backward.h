// The backward of one FP8 product: what it keeps of its forward, and where the gradients of its parameters go.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <memory>
#include <optional>

#include "common/check.h"
#include "common/host_steps.h"
#include "fp8/linear_products.h"

namespace te_graph::fp8 {

// Where sums may go: a multiple of so many bytes.
constexpr size_t kAnywhere = 1;

// Whether what looks at the results of a node is to find them there.
bool is_looked_at(const torch::autograd::Node& node);

class ProductBackward {
public:
    // steps: of the capture that the forward is in, or null.
    ProductBackward(std::shared_ptr<LinearProducts> products, std::shared_ptr<HostSteps> steps,
                    at::ScalarType weight_dtype)
        : products_(std::move(products)), steps_(std::move(steps)), weight_dtype_(weight_dtype) {}

    // weight_t: [I, O], for the gradient of x; x_t [I, padded(M)] and x_scale_inv [1], for that of the weight.
    void save(const at::Tensor& weight_t, const at::Tensor& x_t, const at::Tensor& x_scale_inv);
    void release();

    // Where the cast of the gradient of the result has its scale and amax.
    const ScaleColumn& column() const { return products_->grad_column_; }
    at::ScalarType grad_dtype() const { return products_->grad_dtype_; }
    const LinearProducts& products() const { return *products_; }
    HostSteps* steps() const { return steps_.get(); }

    // What one backward works with.
    struct Run {
        MaybeTensor weight_t, x_t, x_scale_inv;     // as saved
        std::optional<ParameterGrad> weight, bias;  // nothing: a result
        at::ScalarType weight_dtype;                // of the weight's gradient
        // Where the gradients of the parameters go by themselves.
        MaybeTensor weight_memory() const { return memory_of(weight); }  // [O, I] or [I, O]
        MaybeTensor bias_memory() const { return memory_of(bias); }      // [O]
        bool accumulates_weight() const { return weight && weight->accumulate; }
        bool accumulates_bias() const { return bias && bias->accumulate; }
        // [...].
        static MaybeTensor memory_of(const std::optional<ParameterGrad>& grad) {
            return grad ? MaybeTensor(grad->memory) : std::nullopt;
        }
    };
    // First of all: what hooks of saved tensors run, as a checkpoint's recomputation, is no part of what follows.
    Run begin();
    // Then, where gradients may be added up here: finds where. grad: [...], what the ops read, of the dtype of the
    // result. weight, bias: edges to the parameters whose gradients are asked for, or null.
    void find_memory(Run& run, const at::Tensor& grad, const torch::autograd::Edge* weight,
                     const torch::autograd::Edge* bias) const;
    // Multiplies grad [..., O]: gradients of x, [..., I] of x_dtype, weight and bias, as far as output_mask asks for
    // them and they do not go by themselves.
    std::tuple<at::Tensor, at::Tensor, at::Tensor> multiply(const Run& run, const at::Tensor& grad,
                                                            at::ScalarType x_dtype,
                                                            std::array<bool, 3> output_mask) const;
    // After the launches. grad_weight: [O, I] or [I, O], grad_bias: [O], results of the ops -> what the engine gets.
    std::pair<at::Tensor, at::Tensor> end(Run& run, at::Tensor grad_weight, at::Tensor grad_bias);

private:
    // [I, O] or undefined: weight_t, as it was in the forward.
    at::Tensor unpack_weight_t();

    const std::shared_ptr<LinearProducts> products_;
    const std::shared_ptr<HostSteps> steps_;
    const at::ScalarType weight_dtype_;
    const int64_t cast_number_ = products_->cast_number();  // of the weight by the time of the forward
    std::array<torch::autograd::SavedVariable, 3> saved_;
};

}  // namespace te_graph::fp8
