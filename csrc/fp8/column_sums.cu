// Column sums from those of tiles.
#include <algorithm>

#include "fp8/column_sums.cuh"

namespace te_graph::fp8 {
namespace {

struct SumsOfOneMatrix {
    ColumnSums each[kMostSums];
    int64_t columns, tiles;
};

// Grid: x blocks of 256 threads, one for each column, y one for each of several sums.
// Bytes: 4 read for each of tiles_in(M) x N partial sums; the sums written, and read, too, where they add up.
// Determinism: the sums of tiles are added in their order.
__global__ void __launch_bounds__(kThreads)
    fp8_column_sums_kernel(const __grid_constant__ SumsOfOneMatrix work, const Flag noop) {
    wait_for_kernel_before();
    const ColumnSums& sums = work.each[blockIdx.y];
    const int64_t column = blockIdx.x * int64_t{kThreads} + threadIdx.x;
    if (is_set(noop) || column >= work.columns || !sums.out) return;
    constexpr int kBatch = 16;  // so that few reads wait for others
    float sum = 0;
    for (int64_t first = 0; first < work.tiles; first += kBatch) {
        float batch[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            batch[b] = first + b < work.tiles ? sums.partial[(first + b) * work.columns + column] : 0;
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) sum = __fadd_rn(sum, batch[b]);
    }
    end_sum(sums, column, sum);
}

}  // namespace

cudaError_t launch_column_sums(std::initializer_list<ColumnSums> each, int64_t rows, int64_t columns, const Flag& noop,
                               cudaStream_t stream) {
    const bool is_asked_for = std::any_of(each.begin(), each.end(), [](const ColumnSums& sums) { return sums.out; });
    if (!is_asked_for || columns == 0) return cudaSuccess;
    SumsOfOneMatrix work{.each = {}, .columns = columns, .tiles = tiles_in(rows)};
    std::copy(each.begin(), each.end(), work.each);
    const dim3 grid(static_cast<unsigned>((columns + kThreads - 1) / kThreads), static_cast<unsigned>(each.size()));
    return launch_dependent<fp8_column_sums_kernel>(grid, kThreads, 1, stream, work, noop);
}

}  // namespace te_graph::fp8
