// Sums of words of 8 bytes, element by element: in fp32, in the order of the ranks, times a factor, rounded once.
#pragma once

#include "collectives/peers.h"
#include "common/element.cuh"

namespace te_graph::collectives {

template <typename T, int kCount = 8 / sizeof(T)>
struct alignas(8) Packed {
    T values[kCount];
};

template <Reduction kReduction>
__device__ float combine(float a, float b) {
    if constexpr (kReduction == Reduction::kSum) return a + b;
    // NaN propagates, as in torch, always with the bits that sums have.
    return a != a || b != b ? __int_as_float(0x7FFFFFFF) : fmaxf(a, b);
}

// words: one of each rank; scale: of sums; Out: what they are rounded to.
template <typename Out, typename T, Reduction kReduction, int kMaxWords, int kCount = 8 / sizeof(T)>
__device__ Packed<Out, kCount> reduce_words(const uint64_t (&words)[kMaxWords], int world, float scale) {
    float sums[kCount];
#pragma unroll
    for (int p = 0; p < kMaxWords; ++p) {
        if (p >= world) break;
        const auto packed = __builtin_bit_cast(Packed<T>, words[p]);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float value = widen(packed.values[i]);
            sums[i] = p == 0 ? value : combine<kReduction>(sums[i], value);
        }
    }
    Packed<Out, kCount> result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        result.values[i] = narrow<Out>(kReduction == Reduction::kSum ? sums[i] * scale : sums[i]);
    }
    return result;
}

// Calls function.operator()<T, kReduction>().
template <typename Function>
auto with_reduction(Element element, Reduction reduction, const Function& function) {
    if (element == Element::kFloat16) return function.template operator()<__half, Reduction::kSum>();
    if (element == Element::kBFloat16) return function.template operator()<__nv_bfloat16, Reduction::kSum>();
    if (reduction == Reduction::kMax) return function.template operator()<float, Reduction::kMax>();
    return function.template operator()<float, Reduction::kSum>();
}

}  // namespace te_graph::collectives
