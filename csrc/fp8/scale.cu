// Scales from amaxes.
#include <algorithm>

#include "common/resident_blocks.cuh"
#include "fp8/current_scale.cuh"
#include "fp8/element.cuh"

namespace te_graph::fp8 {
namespace {

// The update of delayed scaling (scale.h: Update).
// Grid: a block of 1024 threads for 8 columns, which are one 32-byte sector of a row; 128 threads go down each column.
// What a pass of 1024 rows reads is in registers before it is written one row up.
// Bytes: each element of the history read and written once. Determinism: every element has one writer; the maximum of a
// column does not depend on an order.
constexpr int kColumns = 8, kDepth = 128, kHeld = 8, kPass = kDepth * kHeld;

template <bool kReadsFlag>  // else update_weight_scale_inv, which can be set in a captured launch
__global__ void __launch_bounds__(kColumns* kDepth)
    amax_and_scale_update_kernel(float* history, int64_t row_stride, int64_t column_stride, int height, int columns,
                                 Strided<float> scale, Strided<float> scale_inv, Strided<const bool> mask, Flag flag,
                                 bool update_weight_scale_inv, float scaled_max, bool most_recent,
                                 bool skip_nonfinite) {
    __shared__ float largest[kDepth / 4][kColumns];
    const int column = blockIdx.x * kColumns + threadIdx.x % kColumns, depth = threadIdx.x / kColumns;
    const bool is_inside = column < columns;
    const auto at = [&](int row) -> float& { return history[row * row_stride + column * column_stride]; };
    const float newest = is_inside ? at(0) : 0;
    const bool is_left_out = skip_nonfinite && !(newest <= FLT_MAX);
    const bool is_rolled = newest != 0 && !is_left_out;

    float amax = 0;
    for (int pass = 0; pass < height; pass += kPass) {
        float held[kHeld];
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            const int row = pass + k * kDepth + depth;
            held[k] = is_rolled && row < height ? at(row) : 0;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
            const int row = pass + k * kDepth + depth;
            amax = fmaxf(amax, held[k]);  // leaves NaNs out
            if (is_rolled && row >= 2 && row < height) at(row - 1) = held[k];
        }
    }
    // The row that goes to the end is written by no other thread.
    if (is_inside && depth == 0) {
        if (is_rolled && height > 1) at(height - 1) = newest;
        at(0) = 0;
    }
    if (most_recent) amax = newest;

    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, kColumns));
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2 * kColumns));
    if (threadIdx.x % 32 < kColumns) largest[depth / 4][threadIdx.x % kColumns] = amax;
    __syncthreads();
    if (!is_inside || depth != 0) return;
    for (int i = 1; i < kDepth / 4; ++i) amax = fmaxf(amax, largest[i][threadIdx.x]);
    if (most_recent) amax = newest;  // a NaN, too
    float present = scale[column];
    if (is_rolled) scale[column] = present = next_scale(amax, scaled_max, present);
    const bool for_weights = kReadsFlag ? is_set(flag) : update_weight_scale_inv;
    if (for_weights || !mask.data || mask[column]) scale_inv[column] = __frcp_rn(present);
}

// Current scaling.
// Grid: as many blocks of 256 threads as are resident, each taking every n-th group of 2048 elements; the last one
// through computes the scale.
// Bytes per element: the input read once. Determinism: the maximum of bits, in any order.
__global__ void __launch_bounds__(kThreads) fp8_current_scale_kernel(const CurrentScale work) {
    constexpr int kBatch = 4;
    unsigned amax = 0;
    with_dtype(work.dtype, [&]<typename T>() {
        const auto* const input = static_cast<const T*>(work.input);
        const bool is_aligned = reinterpret_cast<uintptr_t>(input) % 16 == 0;
        const int64_t step = int64_t{gridDim.x} * kThreads * 8;
        for (int64_t first = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * 8; first < work.numel;
             first += kBatch * step) {
            Vector<T, 8> batch[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                const int64_t i = first + b * step;
                if (is_aligned && i + 8 <= work.numel) {
                    batch[b] = *reinterpret_cast<const Vector<T, 8>*>(input + i);
                } else {
                    batch[b] = load_eight<false>(input + i, work.numel - i);
                }
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
#pragma unroll
                for (int k = 0; k < 8; ++k) amax = max(amax, amax_bits(batch[b].values[k]));
            }
        }
    });
    finish_current_scale(work, amax);
}

// Scales of amaxes that are given.
// Grid: blocks of 256 threads, one for each scale. Bytes per element: 4 read, 4 written. Determinism: one writer each.
__global__ void fp8_scale_kernel(const float* amax, float* scale, int64_t count, const ScaleRule rule) {
    const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
    if (i < count) scale[i] = scale_of(amax[i], rule);
}

}  // namespace

cudaError_t launch_amax_and_scale_update(const Update& u, cudaStream_t stream) {
    if (u.columns == 0) return cudaSuccess;
    const auto kernel = u.flag.data ? amax_and_scale_update_kernel<true> : amax_and_scale_update_kernel<false>;
    kernel<<<(u.columns + kColumns - 1) / kColumns, kColumns * kDepth, 0, stream>>>(
        u.history, u.row_stride, u.column_stride, u.height, u.columns, u.scale, u.scale_inv, u.mask, u.flag,
        u.update_weight_scale_inv, u.scaled_max, u.most_recent, u.skip_nonfinite);
    return cudaGetLastError();
}

cudaError_t launch_current_scale(const CurrentScale& work, cudaStream_t stream) {
    if (const cudaError_t error = cudaMemsetAsync(work.state, 0, 2 * sizeof(uint32_t), stream); error != cudaSuccess) {
        return error;
    }
    const int64_t needed = std::max<int64_t>(1, (work.numel + kThreads * 8 - 1) / (kThreads * 8));
    const auto blocks = static_cast<unsigned>(resident_blocks(fp8_current_scale_kernel, kThreads, needed));
    fp8_current_scale_kernel<<<blocks, kThreads, 0, stream>>>(work);
    return cudaGetLastError();
}

cudaError_t launch_scale(const float* amax, float* scale, int64_t count, const ScaleRule& rule, cudaStream_t stream) {
    if (count == 0) return cudaSuccess;
    fp8_scale_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(amax, scale,
                                                                                                        count, rule);
    return cudaGetLastError();
}

std::vector<KernelFunction> amax_and_scale_update_kernels() { return {&amax_and_scale_update_kernel<false>}; }

}  // namespace te_graph::fp8
