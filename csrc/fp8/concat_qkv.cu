// Gradients of queries, keys and values, put side by side.
#include <algorithm>

#include "common/dependent_launch.cuh"
#include "fp8/qkv.h"

namespace te_graph::fp8 {
namespace {

constexpr int kThreadsOfRow = 256;

// Grid: x one of [outer, inner], y blocks of 256 threads over its pieces, each moving one.
// Bytes per element of b bytes: b read, b written. Determinism: every element has one writer.
__global__ void __launch_bounds__(kThreadsOfRow) concat_qkv_kernel(const __grid_constant__ Qkv work) {
    wait_for_kernel_before();
    const int heads = work.heads_per_group + 2, pieces = work.groups * heads * work.pieces;
    const int piece = static_cast<int>(blockIdx.y) * kThreadsOfRow + static_cast<int>(threadIdx.x);
    if (piece >= pieces) return;
    const int head = piece / work.pieces, group = head / heads, of_group = head % heads;
    const QkvPart& part = of_group < work.heads_per_group    ? work.query
                          : of_group == work.heads_per_group ? work.key
                                                             : work.value;
    const int of_part = of_group < work.heads_per_group ? group * work.heads_per_group + of_group : group;
    const int64_t outer = blockIdx.x / work.inner, inner = blockIdx.x % work.inner;
    const int64_t from = outer * part.outer_stride + inner * part.inner_stride + of_part * part.head_stride;
    static_cast<uint4*>(work.out)[int64_t{blockIdx.x} * pieces + piece] =
        static_cast<const uint4*>(part.data)[from + piece % work.pieces];
}

}  // namespace

cudaError_t launch_concat_qkv(const Qkv& work, cudaStream_t stream) {
    const int pieces = work.groups * (work.heads_per_group + 2) * work.pieces;
    const dim3 grid(static_cast<unsigned>(work.outer * work.inner),
                    static_cast<unsigned>((pieces + kThreadsOfRow - 1) / kThreadsOfRow));
    if (grid.x == 0 || grid.y == 0) return cudaSuccess;
    return launch_dependent<concat_qkv_kernel>(grid, kThreadsOfRow, 1, stream, work);
}

}  // namespace te_graph::fp8
