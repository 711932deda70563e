// FP8 numbers on the device.
#pragma once

#include <cuda_fp8.h>

#include "common/element.cuh"
#include "fp8/cast.h"

namespace te_graph::fp8 {

using te_graph::widen;  // beside those of FP8 numbers

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// GPUs without FP8 convert in some hundred instructions, which take minutes to compile where they are inlined.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define TE_GRAPH_CONVERSION __noinline__
#else
#define TE_GRAPH_CONVERSION
#endif

// Two numbers, the first one in the lower byte.
template <Format kFormat>
__device__ TE_GRAPH_CONVERSION uint32_t to_fp8_pair(float first, float second) {
    return __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, kFormat == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2);
}
#undef TE_GRAPH_CONVERSION

__device__ inline float widen(uint8_t bits, Format format) {
    const auto kind = format == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, kind)));
}

// Calls function.operator()<T>() with the type of `dtype`, which is no fp64. Functions are of one side alone, host or
// device, and so are the calls, which the compiler does not see.
#pragma nv_exec_check_disable
template <typename Function>
__host__ __device__ void with_dtype(DType dtype, const Function& function) {
    switch (dtype) {
        case DType::kFloat16:
            return function.template operator()<__half>();
        case DType::kBFloat16:
            return function.template operator()<__nv_bfloat16>();
        default:
            return function.template operator()<float>();
    }
}

// with_dtype() with the format, as operator()<T, kFormat>().
template <typename Function>
__device__ void with_cast(const Cast& cast, const Function& function) {
    with_dtype(cast.dtype, [&]<typename T>() {
        if (cast.format == Format::kE4M3) {
            function.template operator()<T, Format::kE4M3>();
        } else {
            function.template operator()<T, Format::kE5M2>();
        }
    });
}

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

// out: at a 16-byte boundary.
template <typename T>
__device__ void store_eight(T* out, const Vector<T, 8>& eight) {
    constexpr int kParts = sizeof(eight) / 16;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        reinterpret_cast<uint4*>(out)[part] = reinterpret_cast<const uint4*>(&eight)[part];
    }
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
