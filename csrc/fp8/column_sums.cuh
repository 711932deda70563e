// Column sums of what the tiles of a cast hold (cast.h), and how they end: where few tiles lie one below the other, the
// blocks of these are a cluster, the first of which adds all of them; else each leaves its own in memory, and another
// launch adds them (column_sums.cu). So it does where there are more tiles than multiprocessors: clusters would wait for
// each other, which takes longer than the launch.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/resident_blocks.cuh"
#include "fp8/element.cuh"

namespace te_graph::fp8 {

constexpr int kGroups = kTile / kGroupRows;  // of a tile
constexpr int64_t kMostInCluster = 8;        // which all GPUs with clusters can hold

// How the threads of a block share kTile rows: each works on some of them, and on eight columns. A wide tile is as wide
// as it is high. Of a thin one a thread has a quarter as many elements to work on one after the other, which is what
// small matrices take their time for.
enum class Tiling { kWide, kThin };
constexpr int columns_of(Tiling tiling) { return tiling == Tiling::kWide ? static_cast<int>(kTile) : 32; }
constexpr int lanes_of(Tiling tiling) { return columns_of(tiling) / 8; }
constexpr int rows_of(Tiling tiling) { return static_cast<int>(kTile) * lanes_of(tiling) / kThreads; }
static_assert(rows_of(Tiling::kWide) == kGroupRows && kGroupRows % rows_of(Tiling::kThin) == 0);

// Where a tile lies. by_columns: those of a column follow each other.
struct Corner {
    int64_t top, left;
    // Empty matrices have a tile, too.
    __device__ Corner(const Cast& cast, int index, Tiling tiling = Tiling::kWide, bool by_columns = false) {
        const int64_t tiles = by_columns ? tiles_in(cast.rows) : tiles_in(cast.columns, columns_of(tiling));
        const int along = max(1, static_cast<int>(tiles)), first = index / along, second = index % along;
        top = int64_t{by_columns ? second : first} * kTile;
        left = int64_t{by_columns ? first : second} * columns_of(tiling);
    }
};

// What a thread's rows add to the sums of its eight columns: added up where they are a whole group, else kept apart.
template <Tiling kTiling>
struct ThreadSums {
    static constexpr bool kIsWhole = rows_of(kTiling) == kGroupRows;
    float values[kIsWhole ? 1 : rows_of(kTiling)][8] = {};

    __device__ void add(int row, int k, float term) {
        float& value = values[kIsWhole ? 0 : row][k];
        value = kIsWhole ? __fadd_rn(value, term) : term;
    }
};

// Shared memory where rows are kept apart; one sum after the other may use it.
template <Tiling kTiling>
struct SharedTerms {
    float of_rows[ThreadSums<kTiling>::kIsWhole ? 1 : kTile][columns_of(kTiling)];
};

// Those of groups of rows of a tile, which its threads leave there.
template <Tiling kTiling>
struct TileSums {
    static constexpr int kColumns = columns_of(kTiling), kLanes = lanes_of(kTiling), kRows = rows_of(kTiling);
    const ColumnSums& sums;
    float (&of_groups)[kGroups][kColumns];

    // Of all threads.
    __device__ void put(const ThreadSums<kTiling>& of_thread, SharedTerms<kTiling>& terms) const {
        const int first = threadIdx.x / kLanes, column = threadIdx.x % kLanes * 8;
        if constexpr (ThreadSums<kTiling>::kIsWhole) {
#pragma unroll
            for (int k = 0; k < 8; ++k) of_groups[first][column + k] = of_thread.values[0][k];
        } else {
            __syncthreads();  // those of another sum may still be read
#pragma unroll
            for (int row = 0; row < kRows; ++row) {
#pragma unroll
                for (int k = 0; k < 8; ++k) terms.of_rows[first * kRows + row][column + k] = of_thread.values[row][k];
            }
            __syncthreads();
            for (int i = threadIdx.x; i < kGroups * kColumns; i += kThreads) {
                float sum = 0;
#pragma unroll
                for (int row = 0; row < kGroupRows; ++row) {
                    sum = __fadd_rn(sum, terms.of_rows[i / kColumns * kGroupRows + row][i % kColumns]);
                }
                of_groups[i / kColumns][i % kColumns] = sum;
            }
        }
    }
    // Of the thread's column.
    __device__ float of_tile() const {
        float sum = 0;
        for (int group = 0; group < kGroups; ++group) sum = __fadd_rn(sum, of_groups[group][threadIdx.x]);
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
template <Tiling kTiling, typename... Each>
__device__ void end_sums(const Corner& corner, int64_t rows, int64_t columns, bool in_cluster, const Each&... each) {
    const int64_t column = corner.left + threadIdx.x;
    const bool has_column = threadIdx.x < columns_of(kTiling) && column < columns;
    if (!in_cluster) {
        const auto leave = [&](const auto& of) {
            if (of.sums.out) of.sums.partial[corner.top / kTile * columns + column] = of.of_tile();
        };
        if (has_column && corner.top < rows) (leave(each), ...);
        return;
    }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const auto cluster = cooperative_groups::this_cluster();
    const auto gather = [&](const auto& of) {
        if (of.sums.out) of.of_groups[0][threadIdx.x] = of.of_tile();
    };
    if (has_column) (gather(each), ...);
    cluster.sync();
    const auto add = [&](const auto& of) {
        if (!of.sums.out) return;
        float sum = 0;
        for (unsigned rank = 0; rank < cluster.num_blocks(); ++rank) {
            sum = __fadd_rn(sum, *cluster.map_shared_rank(&of.of_groups[0][threadIdx.x], rank));
        }
        end_sum(of.sums, column, sum);
    };
    if (has_column && cluster.block_rank() == 0) (add(each), ...);
    cluster.sync();  // the memory of a block that has ended cannot be read
#endif
}

// Launches kKernel(arguments..., in_cluster) over the tiles of `cast`, and then what ends the sums `each` of them.
template <auto kKernel, Tiling kTiling, typename... Arguments>
cudaError_t launch_with_sums(const Cast& cast, std::initializer_list<ColumnSums> each, const Flag& noop,
                             cudaStream_t stream, const Arguments&... arguments) {
    const bool has_sums = std::any_of(each.begin(), each.end(), [](const ColumnSums& sums) { return sums.out; });
    const int64_t down = tiles_in(cast.rows), tiles = down * tiles_in(cast.columns, columns_of(kTiling));
    bool in_cluster = false;
    if (has_sums && tiles > 0 && down <= kMostInCluster && tiles <= multiprocessors()) {
        if (const cudaError_t error = find_is_for_hopper<kKernel>(in_cluster); error != cudaSuccess) return error;
    }
    const auto grid = static_cast<unsigned>(std::max<int64_t>(1, tiles));
    const unsigned cluster = in_cluster ? static_cast<unsigned>(down) : 1;
    const cudaError_t error = launch_dependent<kKernel>(grid, kThreads, cluster, stream, arguments..., in_cluster);
    if (error != cudaSuccess || in_cluster) return error;
    return launch_column_sums(each, cast.rows, cast.columns, noop, stream);
}

// Calls function.operator()<kTiling>() with thin tiles where wide ones would leave multiprocessors without one.
template <typename Function>
cudaError_t with_tiling(const Cast& cast, const Function& function) {
    if (tiles_of(cast) < multiprocessors()) return function.template operator()<Tiling::kThin>();
    return function.template operator()<Tiling::kWide>();
}

}  // namespace te_graph::fp8
