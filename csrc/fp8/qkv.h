// Gradients of queries, keys and values, put side by side. No Torch here.
#pragma once

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime.h>

#include <cstdint>

namespace te_graph::fp8 {

constexpr int kPiece = 16;  // bytes that a thread moves

// One of the three: [outer, inner, heads, head], whose heads are contiguous. Strides in pieces.
struct QkvPart {
    const void* data;
    int64_t outer_stride, inner_stride, head_stride;
};

// out: [outer, inner, groups, heads_per_group + 2, head], contiguous: of each group its queries, its key, its value.
struct Qkv {
    QkvPart query, key, value;
    void* out;
    int64_t outer, inner;
    int groups, heads_per_group, pieces;  // of a head
};

// No allocation, no host sync.
cudaError_t launch_concat_qkv(const Qkv& work, cudaStream_t stream);

}  // namespace te_graph::fp8
#endif
