// Accumulation and copies over pairs of tensors: the last node of every captured backward graph, the widening of bf16
// gradients into fp32 ones, casts of parameters. No Torch here.
//
//   mode store: destination[i] = source[i] * scale
//   mode add:   destination[i] = destination[i] + source[i] * scale, in fp32 (fp64 from fp64), rounded once
//   mode skip:  destination is not touched
//
// Ops add equal dtypes, and fp16 / bf16 into fp32; they store any into any. Other pairs with fp64 on a side, and fp16
// with bf16, are computed in fp64. The sum of squares goes with what ops add, and is NaN with other pairs. Without a
// scale, a source of the destination's dtype is stored bit by bit. Fused into the pass, where asked for: zeroing of the
// source, the sum of squares of what was written, and whether all of that was finite.
#pragma once

#include "multi_tensor/scale.h"
#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

// A change of one entry, small enough that 128 of them travel as kernel arguments: nothing on the host has to outlive
// the launch.
struct EntryUpdate {
    const void* source;
    void* destination;
    int32_t entry;
    Mode mode;
    bool has_source;  // else the entry's source stays
};

struct Accumulation {
    Scalar scale;              // of the sources; the number 1 means none
    bool zero_source = false;  // sources are zeroed, in entries that are skipped too
    uint64_t* sum_squares =
        nullptr;                  // [kPartialWords] (exact_sum.h): as norm.h would find in the destinations for p = 2
    float* found_inf = nullptr;   // [1], set to 1 if something written is not finite
    const float* noop = nullptr;  // [1]: where it is not 0, nothing at all is written
    bool has_mode = false;        // `mode` holds for all entries, whatever theirs is
    Mode mode = Mode::kAdd;

    // Whether it only stores or adds, as the gradients of a graph are.
    bool is_plain() const {
        return scale.data == nullptr && scale.value == 1 && !zero_source && !sum_squares && !found_inf && !noop;
    }
};

// CPU: the executable specification.
void accumulate_cpu(const TensorTable& tensors, const Accumulation& accumulation);
void update_entries_cpu(TableEntry* table, const EntryUpdate* updates, int64_t count);

#ifdef TE_GRAPH_CUDA
// No allocation, no host sync. One launch for a table or up to kInlinePairs pairs, else several.
cudaError_t launch_accumulate(const TensorTable& tensors, const Accumulation& accumulation, cudaStream_t stream);
// updates: [count] in host memory, of distinct entries; read before the call returns.
cudaError_t launch_update_entries(TableEntry* table, const EntryUpdate* updates, int64_t count, cudaStream_t stream);
#endif

}  // namespace te_graph::multi_tensor
