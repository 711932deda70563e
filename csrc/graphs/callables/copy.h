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

// x + -0.0 has the bits of x for every x, so a gradient that is none changes no sum.
void fill_with_negative_zeros(const at::Tensor& tensor);

}  // namespace te_graph::graphs
