// Elements of tensors on the device: dtypes, conversions, 16-byte accesses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

namespace te_graph {

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// The type that elements of T are computed in: fp64 for fp64, else fp32.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T, typename From>
__device__ T narrow(From value) {
    if constexpr (std::is_same_v<T, __half>) {
        // Not through fp32 where the value is fp64: that would round twice.
        if constexpr (std::is_same_v<From, double>) return __double2half(value);
        return __float2half_rn(value);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        if constexpr (std::is_same_v<From, double>) return __double2bfloat16(value);
        return __float2bfloat16_rn(value);
    } else {
        return static_cast<T>(value);
    }
}

// Calls function.operator()<T>() with the type of `dtype`.
template <typename Function>
__device__ void with_type(DType dtype, const Function& function) {
    switch (dtype) {
        case DType::kFloat32:
            return function.template operator()<float>();
        case DType::kFloat64:
            return function.template operator()<double>();
        case DType::kFloat16:
            return function.template operator()<__half>();
        case DType::kBFloat16:
            return function.template operator()<__nv_bfloat16>();
    }
}

template <typename T, int kCount = kVector<T>>
struct alignas(sizeof(T) * kCount) Vector {
    T values[kCount];
};

template <typename... T>
__device__ bool is_aligned(const T*... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

}  // namespace te_graph
