// Writes to the memory of a weight by which its version counter does not move.
//
// `weight.data` is a tensor over the same memory with a counter of its own, and `weight.data = other` gives the weight
// the memory of another one, which keeps its counter. Libraries write weights so: adapters are merged, averages swapped
// in, parameters copied from master weights or gathered into flat buffers. torch hands both out through an interface
// that can be replaced (VariableHooksInterface), so those counters are known here, and what they count is seen as
// exactly as a write to the weight itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace te_graph::fp8 {

// From now on, in this process, tensors over other tensors' memory are kept in view. What was made before is not.
void watch_data();

// How often the memory of `tensor` [...] was written by operations on the tensor, its views and those in view. It only
// grows while the tensor keeps its storage.
int64_t write_count(const at::Tensor& tensor);

}  // namespace te_graph::fp8
