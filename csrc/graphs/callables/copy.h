// Copies into static memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/check.h"

namespace te_graph::graphs {

// destination.copy_(source) for tensors of equal shape, dtype and device: one memcpy where the layouts agree.
void copy_into(const at::Tensor& destination, const at::Tensor& source);

// True where both are dense, and their elements lie in another order. Where they do, kernels that choose by layout may
// round otherwise.
bool lie_in_other_order(const at::Tensor& one, const at::Tensor& other);

// Negative zeros: x + -0.0 has the bits of x for every x, so what is added to this keeps its bits.
void fill_with_no_gradient(const at::Tensor& tensor);

}  // namespace te_graph::graphs
