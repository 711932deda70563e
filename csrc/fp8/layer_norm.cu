// Layer norm and RMS norm, cast where they are made, and their derivatives.
//
// Rows are worked on by a warp each, four a block; the rest in tiles of 128 x 128 or of 128 x 32 elements, a block each
// (cast_tile.cuh).
// Determinism: every element has one writer; sums have a fixed order (layer_norm.h); amax is a maximum.
#include <algorithm>

#include "fp8/current_scale.cuh"
#include "fp8/layer_norm_source.cuh"

namespace te_graph::fp8 {
namespace {

constexpr int kRows = 4;  // of a block

// Sums over a row of what add(load(column), sums) adds, for eight columns from `column` on. All lanes of the warp get
// them.
template <int kSums, typename Load, typename Add>
__device__ void sum_row(int64_t columns, float (&sums)[kSums], const Load& load, const Add& add) {
    constexpr int kBatch = 4, kStride = kRowLanes * 8;  // eights that are loaded before the first is added
    for (int64_t from = threadIdx.x % kRowLanes * 8; from < columns; from += kBatch * kStride) {
        decltype(load(from)) batch[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            if (from + b * kStride < columns) batch[b] = load(from + b * kStride);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            if (from + b * kStride < columns) add(batch[b], sums);
        }
    }
#pragma unroll
    for (int apart = kRowLanes / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (float& sum : sums) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, apart));
    }
}

// Grid: blocks of four warps, each taking a row.
// Bytes per element of b bytes: x read, and once more from the cache; with a residual that is read, too, and s written.
template <typename T>
__global__ void __launch_bounds__(kRows* kRowLanes) fp8_layer_norm_stats_kernel(const LayerNormStats work) {
    wait_for_kernel_before();
    const int64_t row = blockIdx.x * int64_t{kRows} + threadIdx.x / kRowLanes;
    if (row >= work.rows) return;
    const int64_t first = row * work.columns;
    const auto columns = static_cast<float>(work.columns);
    const T* const x = static_cast<const T*>(work.x) + first;
    const T* const residual = work.residual ? static_cast<const T*>(work.residual) + first : nullptr;
    T* const sum = residual ? static_cast<T*>(work.sum) + first : nullptr;
    // Each lane reads again what it has written itself.
    const auto load_sum = [&](int64_t column) { return load_eight<true>((sum ? sum : x) + column, 8); };
    if (residual) {
        constexpr int kBatch = 4, kStride = kRowLanes * 8;  // eights that are loaded before the first is written
        for (int64_t from = threadIdx.x % kRowLanes * 8; from < work.columns; from += kBatch * kStride) {
            Vector<T, 8> eights[kBatch], more[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int64_t column = from + b * kStride, end = work.columns - column;
                eights[b] = load_eight<true>(x + column, end);
                more[b] = load_eight<true>(residual + column, end);
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int64_t column = from + b * kStride;
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const float added = __fadd_rn(widen(eights[b].values[k]), widen(more[b].values[k]));
                    eights[b].values[k] = narrow<T>(added);
                }
                if (column < work.columns) store_eight(sum + column, eights[b]);
            }
        }
    }
    float mean[1] = {};
    if (work.mean) {
        sum_row(work.columns, mean, load_sum, [](const Vector<T, 8>& eight, float(&sums)[1]) {
#pragma unroll
            for (int k = 0; k < 8; ++k) sums[0] = __fadd_rn(sums[0], widen(eight.values[k]));
        });
        mean[0] = __fdiv_rn(mean[0], columns);
    }
    float squares[1] = {};
    sum_row(work.columns, squares, load_sum, [&](const Vector<T, 8>& eight, float(&sums)[1]) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float apart = __fsub_rn(widen(eight.values[k]), mean[0]);
            sums[0] = __fadd_rn(sums[0], __fmul_rn(apart, apart));
        }
    });
    if (threadIdx.x % kRowLanes != 0) return;
    if (work.mean) work.mean[row] = mean[0];
    work.rstd[row] = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares[0], columns), work.eps)));
}

// Grid: one block for a tile. Bytes per element of b bytes: b read, 1 written, and 1 for the transposed copy.
template <typename T, Format kFormat, Tiling kTiling>
__global__ void __launch_bounds__(kThreads, 2)
    fp8_layer_norm_cast_kernel(const LayerNorm work, const Cast cast, const bool in_cluster) {
    wait_for_kernel_before();
    __shared__ Shared<Extra::kNone, kTiling> shared;
    const auto index = static_cast<int>(blockIdx.x);
    const Corner corner(cast, index, kTiling, in_cluster);
    const Position position = position_in<kTiling>(corner);
    LayerNormSource<T> source(work, position);
    read_tile<T, kFormat, true>(source, cast, {}, position, shared);
    __syncthreads();
    write_tile(cast, corner, index, shared);
}

// Grid: blocks of four warps, each taking a row. Bytes per element of b bytes: 2 b read.
template <typename T>
__global__ void __launch_bounds__(kRows* kRowLanes) fp8_layer_norm_row_sums_kernel(const LayerNormBackward work) {
    wait_for_kernel_before();
    const LayerNorm& norm = work.norm;
    const int64_t row = blockIdx.x * int64_t{kRows} + threadIdx.x / kRowLanes;
    if (row >= norm.rows) return;
    const T* const sum = static_cast<const T*>(norm.sum) + row * norm.columns;
    const T* const grad = static_cast<const T*>(work.grad) + row * norm.columns;
    const Row at(norm, row);
    float sums[2] = {};
    with_dtype(norm.weight_dtype, [&]<typename W>() {
        struct Loaded {
            Vector<T, 8> sum, dy;
            Vector<W, 8> weight;
        };
        const auto load = [&](int64_t column) -> Loaded {
            return {load_eight<true>(sum + column, 8), load_eight<true>(grad + column, 8),
                    eight_of<W>(norm.weight, column)};
        };
        sum_row(norm.columns, sums, load, [&](const Loaded& loaded, float(&totals)[2]) {
            const Vector<float, 8> gain = gain_of(norm, loaded.weight);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float dn = __fmul_rn(widen(loaded.dy.values[k]), gain.values[k]);
                totals[0] = __fadd_rn(totals[0], __fmul_rn(dn, at.normalized(loaded.sum.values[k])));
                totals[1] = __fadd_rn(totals[1], dn);
            }
        });
    });
    if (threadIdx.x % kRowLanes == 0) {
        work.row_sums[2 * row] = sums[0];
        work.row_sums[2 * row + 1] = sums[1];
    }
}

// What read_tile() makes, where it is not cast.
template <Tiling kTiling, typename Source>
__device__ void make_rows(Source& source, const Cast& cast, const Position& position) {
    constexpr int kBatch = 2;  // rows that are loaded before the first is made
    const auto is_inside = [&](int i) { return position.row + i < cast.rows && position.column < cast.columns; };
#pragma unroll
    for (int first = 0; first < rows_of(kTiling); first += kBatch) {
        typename Source::Loaded batch[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            batch[b] = source.template load<true>(first + b, is_inside(first + b) ? 8 : 0);
        }
        if (first == 0) source.prepare();
#pragma unroll
        for (int b = 0; b < kBatch; ++b) source.make(first + b, batch[b], is_inside(first + b));
    }
}

// Grid: one block for a tile. kCasts: ds is cast.
// Bytes per element of b bytes: 2 b read, b written, b more for grad_sum, 1 for the cast, and 1 for its transposed
// copy.
template <typename T, Format kFormat, bool kCasts, Tiling kTiling>
__global__ void __launch_bounds__(kThreads, 2)
    fp8_layer_norm_backward_kernel(const LayerNormBackward work, const Cast cast, const ColumnSums sums,
                                   const bool in_cluster) {
    wait_for_kernel_before();
    __shared__ Shared<Extra::kSums, kTiling> shared;
    __shared__ float weight_sums[kGroups][columns_of(kTiling)], bias_sums[kGroups][columns_of(kTiling)];
    const TileSums<kTiling> of_weight{work.weight_sums, weight_sums}, of_bias{work.bias_sums, bias_sums};
    const auto index = static_cast<int>(blockIdx.x);
    const Corner corner(cast, index, kTiling, in_cluster);
    const Position position = position_in<kTiling>(corner);
    LayerNormBackwardSource<T, kTiling> source(work, position);
    if constexpr (kCasts) {
        read_tile<T, kFormat, true>(source, cast, sums, position, shared);
    } else {
        make_rows<kTiling>(source, cast, position);
    }
    of_weight.put(source.weight_sums, shared.terms);
    of_bias.put(source.bias_sums, shared.terms);
    __syncthreads();
    if constexpr (kCasts) {
        write_tile(cast, corner, index, shared);
        const TileSums<kTiling> of_cast{sums, shared.sums};
        end_sums<kTiling>(corner, cast.rows, cast.columns, in_cluster, of_cast, of_weight, of_bias);
    } else {
        end_sums<kTiling>(corner, cast.rows, cast.columns, in_cluster, of_weight, of_bias);
    }
}

unsigned blocks_of_rows(int64_t rows) { return static_cast<unsigned>((rows + kRows - 1) / kRows); }

}  // namespace

cudaError_t launch_layer_norm_stats(const LayerNormStats& work, cudaStream_t stream) {
    if (work.rows == 0) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    with_dtype(work.dtype, [&]<typename T>() {
        error = launch_dependent<fp8_layer_norm_stats_kernel<T>>(blocks_of_rows(work.rows), kRows * kRowLanes, 1,
                                                                 stream, work);
    });
    return error;
}

cudaError_t launch_layer_norm_cast(const LayerNorm& work, const Cast& cast, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    with_dtype(work.dtype, [&]<typename T>() {
        with_format(cast.format, [&]<Format kFormat>() {
            error = with_tiling(cast, [&]<Tiling kTiling>() {
                constexpr auto kKernel = fp8_layer_norm_cast_kernel<T, kFormat, kTiling>;
                return launch_with_sums<kKernel, kTiling>(cast, {}, {}, stream, work, cast);
            });
        });
    });
    return error;
}

cudaError_t launch_layer_norm_current_scale(const LayerNorm& work, const CurrentScale& scale, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    with_dtype(work.dtype, [&]<typename T>() {
        error = launch_current_scale_of<LayerNormSource<T>>(work, work.rows, work.columns, scale, stream);
    });
    return error;
}

cudaError_t launch_layer_norm_backward(const LayerNormBackward& work, const Cast& cast, const ColumnSums& sums,
                                       cudaStream_t stream) {
    const std::initializer_list<ColumnSums> each = {sums, work.weight_sums, work.bias_sums};
    cudaError_t error = cudaSuccess;
    with_dtype(work.norm.dtype, [&]<typename T>() {
        if (cast.rows > 0) {
            error = launch_dependent<fp8_layer_norm_row_sums_kernel<T>>(blocks_of_rows(cast.rows), kRows * kRowLanes, 1,
                                                                        stream, work);
        }
        const auto launch = [&]<Format kFormat, bool kCasts>() {
            if (error != cudaSuccess) return;
            error = with_tiling(cast, [&]<Tiling kTiling>() {
                constexpr auto kKernel = fp8_layer_norm_backward_kernel<T, kFormat, kCasts, kTiling>;
                return launch_with_sums<kKernel, kTiling>(cast, each, {}, stream, work, cast, sums);
            });
        };
        if (!work.is_cast) return launch.template operator()<Format::kE4M3, false>();
        with_format(cast.format, [&]<Format kFormat>() { launch.template operator()<kFormat, true>(); });
    });
    return error;
}

}  // namespace te_graph::fp8
