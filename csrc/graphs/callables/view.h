// How one tensor lies in the memory of another, to be found again in the tensors of later calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace te_graph::graphs {

class View {
public:
    // True when `tensor` was made from `base` by view operators alone, which autograd can make again from another base:
    // not in a custom Function, whose backward is its own, and not by an operator of several results.
    static bool is_differentiable(const at::Tensor& tensor, const at::Tensor& base);
    // True when a View can be made: a differentiable one, or one that autograd knows nothing of.
    static bool is_possible(const at::Tensor& tensor, const at::Tensor& base);

    View(const at::Tensor& tensor, const at::Tensor& base);

    // What `tensor` was to the base at capture, of another `base` of the same sizes and strides.
    at::Tensor of(const at::Tensor& base) const;

private:
    // Keeps what function_ does to each base: view operators, which are differentiable.
    std::shared_ptr<const torch::autograd::ViewFunc> function_;
    bool is_detached_;
    c10::SmallVector<int64_t, 5> sizes_, strides_;
    int64_t offset_;
};

}  // namespace te_graph::graphs
