// Gradients of leaves that somebody else adds up.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace te_graph::flat {

// Whether the backward under way accumulates into `leaf` [...]: autograd.grad, and backward(inputs=...), may not.
bool accumulates_into(const at::Tensor& leaf);

// From now on `take` gets each gradient [...] of `leaf` [...], summed over one backward, and autograd accumulates none.
// It runs on the threads of backwards, on several at once where several backwards run.
void take_gradients(const at::Tensor& leaf, std::function<void(at::Tensor)> take);

}  // namespace te_graph::flat
