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

// How many counters of a storage had been seen by then, those of tensors that are gone included, and how many writes
// all of them had counted.
struct WriteCount {
    int64_t counters = 0, writes = 0;
};

// tensor: [...], in view from now on.
WriteCount write_count(const at::Tensor& tensor);
// Whether the memory of tensor [...] may have been written since `before`, of the same storage: it was, or the tensor
// was not in view then.
bool is_written_since(const at::Tensor& tensor, const WriteCount& before);

}  // namespace te_graph::fp8
