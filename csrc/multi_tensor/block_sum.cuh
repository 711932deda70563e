// Sums of chunks within a block, in the order that norm.h fixes, and the exact sum that a block keeps of them.
#pragma once

#include "common/element.cuh"
#include "multi_tensor/norm.h"

namespace te_graph::multi_tensor {

constexpr int kWarps = kThreads / 32;

template <Norm kNorm, typename T>
__device__ Wide<T> term(T element, Wide<T> p) {
    const Wide<T> value = widen(element);
    if constexpr (kNorm == Norm::kCount) return value != 0 ? 1 : 0;
    if constexpr (kNorm == Norm::kSquare) {
        // Not a fused multiply-add: the CPU shall find the same bits.
        if constexpr (std::is_same_v<T, double>) return __dmul_rn(value, value);
        return __fmul_rn(value, value);
    }
    if constexpr (kNorm == Norm::kPower) {
        if constexpr (std::is_same_v<T, double>) return pow(fabs(value), p);
        return powf(fabsf(value), p);
    }
    // Of zeros, too: the largest one is found by its bits.
    if constexpr (std::is_same_v<T, double>) return fabs(value);
    return fabsf(value);
}

// a and b are not negative. The larger one by bits, so NaN comes before infinity.
template <typename W>
__device__ W larger(W a, W b) {
    return a != a || a > b ? a : b;
}

template <Norm kNorm, typename W>
__device__ W join(W a, W b) {
    if constexpr (kNorm == Norm::kMaximum) return larger(a, b);
    if constexpr (std::is_same_v<W, double>) return __dadd_rn(a, b);
    return __fadd_rn(a, b);
}

// What the lanes of one thread come to.
template <Norm kNorm, typename W, int kCount>
__device__ W lanes_sum(W (&lanes)[kCount]) {
#pragma unroll
    for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
        for (int k = 0; k < kCount; k += 2 * width) lanes[k] = join<kNorm>(lanes[k], lanes[k + width]);
    }
    return lanes[0];
}

template <Norm kNorm, typename W>
__device__ W warp_sum(W value, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        value = join<kNorm>(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    }
    return value;
}

// In shared memory: the partial of the block, and the sums of its warps for two chunks in turn.
struct BlockPartial {
    uint64_t words[kPartialWords];
    double sums[2][kWarps];
};

__device__ inline void clear(BlockPartial& block) {
    for (int i = threadIdx.x; i < kPartialWords; i += kThreads) block.words[i] = 0;
}

// Called by all threads; then comes a barrier. One per chunk is enough: until all threads are past it and the next one,
// they write the other half of `sums`.
template <Norm kNorm, typename W>
__device__ void put_thread_sum(BlockPartial& block, int turn, W sum) {
    sum = warp_sum<kNorm>(sum, 32);
    if (threadIdx.x % 32 == 0) block.sums[turn][threadIdx.x / 32] = sum;
}

// After the barrier, by warp 0: the sum of the chunk.
template <Norm kNorm>
__device__ double chunk_sum(const BlockPartial& block, int turn, bool is_double) {
    const double sum = block.sums[turn][threadIdx.x % kWarps];
    if (is_double) return warp_sum<kNorm>(sum, kWarps);
    return warp_sum<kNorm>(static_cast<float>(sum), kWarps);
}

__device__ inline unsigned long long* word_at(uint64_t* partial, int word) {
    return reinterpret_cast<unsigned long long*>(partial + word);
}

// By one thread.
template <Norm kNorm>
__device__ void add_to_block(BlockPartial& block, double sum) {
    if constexpr (kNorm == Norm::kMaximum) {
        block.words[0] = max(block.words[0], double_bits(sum));
    } else {
        add_exactly(sum, [&](int word, uint64_t amount) { block.words[word] += amount; });
    }
}

// By any thread: to a partial in global memory.
template <Norm kNorm>
__device__ void add_to_global(uint64_t* partial, double sum) {
    if constexpr (kNorm == Norm::kMaximum) {
        atomicMax(word_at(partial, 0), static_cast<unsigned long long>(double_bits(sum)));
    } else {
        add_exactly(sum, [=](int word, uint64_t amount) {
            atomicAdd(word_at(partial, word), static_cast<unsigned long long>(amount));
        });
    }
}

// By all threads: adds the block's partial to `partial` [kPartialWords] in global memory.
template <Norm kNorm>
__device__ void flush(const BlockPartial& block, uint64_t* partial) {
    __syncthreads();
    for (int i = threadIdx.x; i < kPartialWords; i += kThreads) {
        if (block.words[i] == 0) continue;
        const auto amount = static_cast<unsigned long long>(block.words[i]);
        if constexpr (kNorm == Norm::kMaximum) {
            atomicMax(word_at(partial, i), amount);
        } else {
            atomicAdd(word_at(partial, i), amount);
        }
    }
}

}  // namespace te_graph::multi_tensor
