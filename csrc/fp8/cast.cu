// Casts of elements in their order, and back.
//
// Grid: blocks of 256 threads, each for 8192 consecutive elements; a thread takes 8 at a time, four times.
// Bytes per element: of a cast the input read, 1 written; back 1 read, 2 or 4 written.
// Determinism: every element has one writer; amax is a maximum.
#include <algorithm>

#include "fp8/findings.cuh"

namespace te_graph::fp8 {
namespace {

constexpr int kBatch = 4;
constexpr int64_t kBlockElements = kBatch * kThreads * 8;

template <bool kAligned, Format kFormat, bool kCounting, typename T>
__device__ void cast_block(const Cast& cast, Findings<kCounting>& findings) {
    const int64_t numel = cast.rows * cast.columns;
    const int64_t first = blockIdx.x * kBlockElements + threadIdx.x * 8;
    const auto* const input = static_cast<const T*>(cast.input);
    const float scale = *cast.scale;
    Vector<T, 8> batch[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
        const int64_t i = first + b * kThreads * 8;
        batch[b] = load_eight<kAligned>(input + i, numel - i);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
        const int64_t i = first + b * kThreads * 8;
        store_eight<kAligned>(cast.out + i, findings.template cast<kFormat>(batch[b].values, scale), numel - i);
    }
}

template <bool kCounting>
__global__ void __launch_bounds__(kThreads) fp8_cast_kernel(const __grid_constant__ Cast cast, const Flag noop) {
    if (is_set(noop)) return;
    __shared__ BlockFindings<kCounting> block;
    Findings<kCounting> findings;
    with_cast(cast, [&]<typename T, Format kFormat>() {
        // The last eight may be fewer.
        const bool is_whole = (blockIdx.x + 1) * kBlockElements <= cast.rows * cast.columns;
        if (is_whole && is_aligned_for_eights(cast.input, cast.out)) {
            cast_block<true, kFormat, kCounting, T>(cast, findings);
        } else {
            cast_block<false, kFormat, kCounting, T>(cast, findings);
        }
    });
    block.put(findings);
    __syncthreads();
    block.flush(cast);
    if (blockIdx.x == 0 && threadIdx.x == 0 && cast.scale_inv) *cast.scale_inv = __frcp_rn(*cast.scale);
}

__global__ void __launch_bounds__(kThreads) fp8_dequantize_kernel(const Dequantization work) {
    const float scale_inv = *work.scale_inv;
    const int64_t first = blockIdx.x * kBlockElements + threadIdx.x * 8;
    with_dtype(work.dtype, [&]<typename T>() {
        auto* const out = static_cast<T*>(work.out);
        const bool is_aligned = is_aligned_for_eights(out, work.input);
        for (int64_t i = first; i < min(first + kBlockElements, work.numel); i += kThreads * 8) {
            Vector<T, 8> eight;
            if (is_aligned && i + 8 <= work.numel) {
                const uint2 bytes = *reinterpret_cast<const uint2*>(work.input + i);
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    eight.values[k] = narrow<T>(__fmul_rn(widen(byte_of(bytes, k), work.format), scale_inv));
                }
                *reinterpret_cast<Vector<T, 8>*>(out + i) = eight;
            } else {
                for (int64_t j = i; j < min(i + 8, work.numel); ++j) {
                    out[j] = narrow<T>(__fmul_rn(widen(work.input[j], work.format), scale_inv));
                }
            }
        }
    });
}

unsigned blocks_for(int64_t numel) { return static_cast<unsigned>((numel + kBlockElements - 1) / kBlockElements); }

}  // namespace

cudaError_t launch_cast(const Cast& cast, const Flag& noop, cudaStream_t stream) {
    const auto kernel = cast.counts ? fp8_cast_kernel<true> : fp8_cast_kernel<false>;
    // scale_inv is written even where there is nothing to cast.
    kernel<<<std::max(1u, blocks_for(cast.rows * cast.columns)), kThreads, 0, stream>>>(cast, noop);
    return cudaGetLastError();
}

cudaError_t launch_dequantize(const Dequantization& work, cudaStream_t stream) {
    if (work.numel == 0) return cudaSuccess;
    fp8_dequantize_kernel<<<blocks_for(work.numel), kThreads, 0, stream>>>(work);
    return cudaGetLastError();
}

}  // namespace te_graph::fp8
