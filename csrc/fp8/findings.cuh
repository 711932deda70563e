// What the threads of a block find in the elements that they cast.
#pragma once

#include <cfloat>

#include "fp8/element.cuh"

namespace te_graph::fp8 {

// What one thread finds. kCounting: the counts, too.
template <bool kCounting>
struct Findings {
    float amax = 0;
    int counts[kCounting ? kCounts : 1] = {};

    // Casts eight elements, in registers, to eight bytes.
    template <Format kFormat, typename T>
    __device__ uint2 cast(const T (&elements)[8], float scale) {
        uint32_t pairs[4];
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
            const float x = widen(elements[k]), y = widen(elements[k + 1]);
            const float first = __fmul_rn(x, scale), second = __fmul_rn(y, scale);
            // fmaxf leaves NaNs out.
            amax = fmaxf(amax, fmaxf(fabsf(x), fabsf(y)));
            pairs[k / 2] = to_fp8_pair<kFormat>(first, second);
            if constexpr (kCounting) {
                count<kFormat>(x, first, pairs[k / 2], scale);
                count<kFormat>(y, second, pairs[k / 2] >> 8, scale);
            }
        }
        return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
    }

    template <Format kFormat>
    __device__ void count(float x, float product, uint32_t result, float scale) {
        const bool is_finite = fabsf(x) <= FLT_MAX;
        counts[kNotFinite] += !is_finite;
        counts[kSaturated] += is_finite && fabsf(product) > max_of(kFormat);
        counts[kUnderflowed] += x != 0 && scale != 0 && (result & 0x7F) == 0;
    }
};

// The findings of a block, gathered by put() of all threads, a barrier, and flush() of all threads.
template <bool kCounting>
struct BlockFindings {
    float amax[kWarps];
    int counts[kWarps][kCounting ? kCounts : 1];

    __device__ void put(const Findings<kCounting>& findings) {
        const int warp = threadIdx.x / 32;
        // Not negative, so their bits are in order.
        const unsigned largest = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(findings.amax));
        if (threadIdx.x % 32 == 0) amax[warp] = __uint_as_float(largest);
        if constexpr (kCounting) {
            for (int i = 0; i < kCounts; ++i) {
                const int sum = __reduce_add_sync(0xFFFFFFFFu, findings.counts[i]);
                if (threadIdx.x % 32 == 0) counts[warp][i] = sum;
            }
        }
    }

    __device__ void flush(const Cast& cast) const {
        if (threadIdx.x == 0 && cast.amax) {
            float largest = 0;
            for (int warp = 0; warp < kWarps; ++warp) largest = fmaxf(largest, amax[warp]);
            atomicMax(reinterpret_cast<int*>(cast.amax), __float_as_int(largest));
        }
        if constexpr (kCounting) {
            if (threadIdx.x < kCounts && cast.counts) {
                unsigned long long sum = 0;
                for (int warp = 0; warp < kWarps; ++warp) sum += counts[warp][threadIdx.x];
                if (sum) atomicAdd(reinterpret_cast<unsigned long long*>(cast.counts) + threadIdx.x, sum);
            }
        }
    }
};

}  // namespace te_graph::fp8
