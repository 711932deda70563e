// Column sums of what the tiles of a cast hold (cast.h), and how they end: where few tiles lie one below the other, the
// blocks of these are a cluster, the first of which adds all of them; else each leaves its own in memory, and another
// launch adds them (column_sums.cu).
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "fp8/element.cuh"

namespace te_graph::fp8 {

constexpr int kLanes = kTile / 8;  // groups of eight rows, or of eight columns, of a tile
static_assert(kLanes * kLanes == kThreads);
constexpr int64_t kMostInCluster = 8;  // which all GPUs with clusters can hold

// Where a tile lies. by_columns: those of a column follow each other.
struct Corner {
    int64_t top, left;
    // Empty matrices have a tile, too.
    __device__ Corner(const Cast& cast, int index, bool by_columns = false) {
        const int along = max(1, static_cast<int>(tiles_in(by_columns ? cast.rows : cast.columns)));
        const int64_t first = index / along * kTile, second = index % along * kTile;
        top = by_columns ? second : first;
        left = by_columns ? first : second;
    }
};

// Those of groups of rows of a tile, which its threads leave there.
struct TileSums {
    const ColumnSums& sums;
    float (&shared)[kLanes][kTile];

    // sums: of a thread's eight columns.
    __device__ void put(const float (&of_thread)[8]) const {
#pragma unroll
        for (int k = 0; k < 8; ++k) shared[threadIdx.x / kLanes][threadIdx.x % kLanes * 8 + k] = of_thread[k];
    }
    // Of the thread's column.
    __device__ float of_tile() const {
        float sum = 0;
        for (int group = 0; group < kLanes; ++group) sum = __fadd_rn(sum, shared[group][threadIdx.x]);
        return sum;
    }
};

// Writes the sum of a column, or adds it.
__device__ inline void end_sum(const ColumnSums& sums, int64_t column, float sum) {
    with_dtype(sums.dtype, [&]<typename T>() {
        T& out = static_cast<T*>(sums.out)[column];
        const T rounded = narrow<T>(sum);
        out = sums.accumulate ? narrow<T>(__fadd_rn(widen(out), widen(rounded))) : rounded;
    });
}

// Ends the sums `each` of a tile of [rows, columns], after a barrier. in_cluster: the cluster has all tiles of its
// columns.
template <typename... Each>
__device__ void end_sums(const Corner& corner, int64_t rows, int64_t columns, bool in_cluster, const Each&... each) {
    const int64_t column = corner.left + threadIdx.x;
    const bool has_column = threadIdx.x < kTile && column < columns;
    if (!in_cluster) {
        const auto leave = [&](const TileSums& of) {
            if (of.sums.out) of.sums.partial[corner.top / kTile * columns + column] = of.of_tile();
        };
        if (has_column && corner.top < rows) (leave(each), ...);
        return;
    }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const auto cluster = cooperative_groups::this_cluster();
    const auto gather = [&](const TileSums& of) {
        if (of.sums.out) of.shared[0][threadIdx.x] = of.of_tile();
    };
    if (has_column) (gather(each), ...);
    cluster.sync();
    const auto add = [&](const TileSums& of) {
        if (!of.sums.out) return;
        float sum = 0;
        for (unsigned rank = 0; rank < cluster.num_blocks(); ++rank) {
            sum = __fadd_rn(sum, *cluster.map_shared_rank(&of.shared[0][threadIdx.x], rank));
        }
        end_sum(of.sums, column, sum);
    };
    if (has_column && cluster.block_rank() == 0) (add(each), ...);
    cluster.sync();  // the memory of a block that has ended cannot be read
#endif
}

// Launches kKernel(arguments..., in_cluster) over the tiles of `cast`, and then what ends the sums `each` of them.
template <auto kKernel, typename... Arguments>
cudaError_t launch_with_sums(const Cast& cast, std::initializer_list<ColumnSums> each, const Flag& noop,
                             cudaStream_t stream, const Arguments&... arguments) {
    const bool has_sums = std::any_of(each.begin(), each.end(), [](const ColumnSums& sums) { return sums.out; });
    const int64_t tiles = tiles_of(cast), down = tiles_in(cast.rows);
    bool in_cluster = false;
    if (has_sums && tiles > 0 && down <= kMostInCluster) {
        if (const cudaError_t error = find_is_for_hopper<kKernel>(in_cluster); error != cudaSuccess) return error;
    }
    const auto grid = static_cast<unsigned>(std::max<int64_t>(1, tiles));
    const unsigned cluster = in_cluster ? static_cast<unsigned>(down) : 1;
    const cudaError_t error = launch_dependent<kKernel>(grid, kThreads, cluster, stream, arguments..., in_cluster);
    if (error != cudaSuccess || in_cluster) return error;
    return launch_column_sums(each, cast.rows, cast.columns, noop, stream);
}

}  // namespace te_graph::fp8
