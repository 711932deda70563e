// Casts with a transposed copy, of one matrix or of many.
//
// Grid: one block of 256 threads for a tile of 128 x 128 or of 128 x 32 elements (cast_tile.cuh); for a table in device
// memory as many blocks as are resident at once, which take the next tile when they are through with one. So a launch
// that is skipped costs next to nothing, and tiles that are worked on at a time lie side by side.
// Bytes per element: the input read once, 1 written, and 1 for the transposed copy.
// Determinism: every element has one writer; amax is a maximum; column sums have a fixed order (cast.h).
#include <algorithm>

#include "common/resident_blocks.cuh"
#include "fp8/cast_tile.cuh"

namespace te_graph::fp8 {
namespace {

// Matrices as kernel arguments.
template <int kCasts>
struct InlineCasts {
    Cast casts[kCasts];
    uint32_t first_tiles[kCasts];
    int count;

    // The last one that starts at or before `tile`: empty ones have a tile too, for their scale_inv.
    __device__ int find(uint32_t tile) const {
        int low = 0, high = count - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_tiles[middle] <= tile) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }
};
constexpr int kManyCasts = 384;
static_assert(sizeof(InlineCasts<kManyCasts>) <= 32764 - 64);

template <typename Kind, Extra kExtra, int kCasts, Tiling kTiling>
__global__ void __launch_bounds__(kThreads, kResident<kExtra>)
    fp8_cast_transpose_kernel(const __grid_constant__ InlineCasts<kCasts> table, const ColumnSums column_sums,
                              const Flag noop, const bool in_cluster) {
    wait_for_kernel_before();
    if (is_set(noop)) return;
    __shared__ Shared<kExtra, kTiling> shared;
    const int entry = kCasts == 1 ? 0 : table.find(blockIdx.x);
    const Cast& cast = table.casts[entry];
    const int index = static_cast<int>(blockIdx.x - table.first_tiles[entry]);
    const Corner corner(cast, index, kTiling, in_cluster);
    Kind::read(cast, column_sums, corner, shared);
    __syncthreads();
    write_tile(cast, corner, index, shared);
    if constexpr (has_sums(kExtra)) {
        const TileSums<kTiling> sums{column_sums, shared.sums};
        end_sums<kTiling>(corner, cast.rows, cast.columns, in_cluster, sums);
    }
}

// A tile's way from the table into shared memory takes three reads, each waiting for the one before. All are made
// while the tile before it is worked on.
template <typename Kind, Extra kExtra>
__global__ void __launch_bounds__(kThreads, kResident<kExtra>)
    fp8_cast_weights_table_kernel(const Cast* casts, const Tile* tiles, int64_t num_tiles, uint32_t* state,
                                  const Flag noop) {
    if (is_set(noop)) return;
    constexpr int kParts = sizeof(Cast) / sizeof(uint4);
    __shared__ Shared<kExtra, Tiling::kWide> shared;
    __shared__ uint4 parts[2][kParts];
    __shared__ int indices[2];
    __shared__ uint32_t next_tile;
    const auto fetch = [&](const Tile& tile, int turn) {
        parts[turn][threadIdx.x] = reinterpret_cast<const uint4*>(casts + tile.entry)[threadIdx.x];
        indices[turn] = tile.index;
    };
    if (threadIdx.x < kParts) fetch(tiles[blockIdx.x], 0);
    if (threadIdx.x == 0) next_tile = gridDim.x + atomicAdd(&state[0], 1u);
    __syncthreads();
    for (int turn = 0;; turn ^= 1) {
        const Cast& cast = *reinterpret_cast<const Cast*>(parts[turn]);
        const int index = indices[turn];
        const uint32_t next = next_tile;
        const bool fetches = threadIdx.x < kParts && next < num_tiles;
        const Corner corner(cast, index);
        uint32_t after_next = 0;
        if (threadIdx.x == 0) after_next = gridDim.x + atomicAdd(&state[0], 1u);
        Tile ahead;
        if (fetches) ahead = tiles[next];
        Kind::read(cast, {}, corner, shared);
        if (fetches) fetch(ahead, turn ^ 1);
        __syncthreads();
        if (threadIdx.x == 0) next_tile = after_next;
        write_tile(cast, corner, index, shared);
        if (next >= num_tiles) break;
        __syncthreads();
    }
    if (threadIdx.x == 0 && atomicAdd(&state[1], 1u) == gridDim.x - 1) state[0] = state[1] = 0;
}

}  // namespace

cudaError_t launch_cast_transpose(const Cast& cast, const ColumnSums& sums, const Flag& noop, cudaStream_t stream) {
    const InlineCasts<1> table{{cast}, {0}, 1};
    cudaError_t error = cudaSuccess;
    const auto launch = [&]<typename Kind, Extra kExtra>() {
        error = with_tiling(cast, [&]<Tiling kTiling>() {
            constexpr auto kKernel = fp8_cast_transpose_kernel<Kind, kExtra, 1, kTiling>;
            return launch_with_sums<kKernel, kTiling>(cast, {sums}, noop, stream, table, sums, noop);
        });
    };
    if (sums.out) {
        with_kind<true>(kind_of(cast), launch);
    } else {
        with_kind<false>(kind_of(cast), launch);
    }
    return error;
}

cudaError_t launch_cast_weights(std::span<const Cast> casts, const Flag& noop, cudaStream_t stream) {
    InlineCasts<kManyCasts> table;
    for (size_t next = 0; next < casts.size();) {
        int64_t tiles = 0;
        bool is_counting = false;
        for (table.count = 0; table.count < kManyCasts && next < casts.size(); ++table.count, ++next) {
            const Cast& cast = casts[next];
            const int64_t more = std::max<int64_t>(1, tiles_of(cast));
            if (table.count > 0 && tiles + more > INT32_MAX) break;
            table.casts[table.count] = cast;
            table.first_tiles[table.count] = static_cast<uint32_t>(tiles);
            tiles += more;
            is_counting |= cast.counts != nullptr;
        }
        const auto kernel = is_counting
                                ? fp8_cast_transpose_kernel<Mixed, Extra::kSumsAndCounts, kManyCasts, Tiling::kWide>
                                : fp8_cast_transpose_kernel<Mixed, Extra::kNone, kManyCasts, Tiling::kWide>;
        kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(table, {}, noop, false);
        if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

cudaError_t launch_cast_weights_table(const CastTable& table, const Flag& noop, cudaStream_t stream) {
    if (table.num_tiles == 0) return cudaSuccess;
    with_kind<false>(table.kind, [&]<typename Kind, Extra kExtra>() {
        const auto kernel = fp8_cast_weights_table_kernel<Kind, kExtra>;
        const auto blocks = static_cast<unsigned>(resident_blocks(kernel, kThreads, table.num_tiles));
        kernel<<<blocks, kThreads, 0, stream>>>(table.casts, table.tiles, table.num_tiles, table.state, noop);
    });
    return cudaGetLastError();
}

}  // namespace te_graph::fp8
