// FP8 numbers on the device, and what the threads of a block find in the elements that they cast.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>

#include "common/element.cuh"
#include "fp8/cast.h"

namespace te_graph::fp8 {

using te_graph::widen;  // beside those of FP8 numbers

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Two numbers, the first one in the lower byte.
template <Format kFormat>
__device__ uint32_t to_fp8_pair(float first, float second) {
    return __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, kFormat == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2);
}

__device__ inline float widen(uint8_t bits, Format format) {
    const auto kind = format == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, kind)));
}

// Calls function.operator()<T>() with the type of `dtype`, which is no fp64.
template <typename Function>
__device__ void with_input(DType dtype, const Function& function) {
    switch (dtype) {
        case DType::kFloat16:
            return function.template operator()<__half>();
        case DType::kBFloat16:
            return function.template operator()<__nv_bfloat16>();
        default:
            return function.template operator()<float>();
    }
}

// The same with the format, as operator()<T, kFormat>().
template <typename Function>
__device__ void with_cast(const Cast& cast, const Function& function) {
    with_input(cast.dtype, [&]<typename T>() {
        if (cast.format == Format::kE4M3) {
            function.template operator()<T, Format::kE4M3>();
        } else {
            function.template operator()<T, Format::kE5M2>();
        }
    });
}

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

// Elements first, first + 1, ... first + 7 of `input`, zeros from `end` on. kAligned: the eight are within or behind,
// and at 16-byte boundaries.
template <bool kAligned, typename T>
__device__ Vector<T, 8> load_eight(const T* input, int64_t end) {
    Vector<T, 8> eight;
    if constexpr (kAligned) {
        constexpr int kParts = sizeof(eight) / 16;
        auto* const parts = reinterpret_cast<uint4*>(&eight);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            parts[part] = end > 0 ? reinterpret_cast<const uint4*>(input)[part] : uint4{};
        }
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) eight.values[k] = k < end ? input[k] : narrow<T>(0.0f);
    }
    return eight;
}

// Byte k of eight.
__device__ inline uint8_t byte_of(uint2 bytes, int k) {
    return static_cast<uint8_t>((k < 4 ? bytes.x : bytes.y) >> (k % 4 * 8));
}

template <bool kAligned>
__device__ void store_eight(uint8_t* out, uint2 bytes, int64_t end) {
    if constexpr (kAligned) {
        if (end > 0) *reinterpret_cast<uint2*>(out) = bytes;
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (k < end) out[k] = byte_of(bytes, k);
        }
    }
}

}  // namespace te_graph::fp8
