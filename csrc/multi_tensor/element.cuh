// Elements of tensors on the device: dtypes, conversions, 16-byte accesses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

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

// Calls body.operator()<n>(i) for vectors i, i + kThreads, ... i + (n - 1) kThreads of this thread, until all whole
// vectors of kCount among `count` elements are done; returns the number of elements done. Vectors of a batch are
// loaded before the first one is stored, so that enough reads are under way.
template <int kCount, typename Body>
__device__ int for_each_vector(int count, const Body& body) {
    constexpr int kBatch = 4;
    const int vectors = count / kCount;
    int i = threadIdx.x;
    for (; i + (kBatch - 1) * kThreads < vectors; i += kBatch * kThreads) body.template operator()<kBatch>(i);
    for (; i < vectors; i += kThreads) body.template operator()<1>(i);
    return vectors * kCount;
}

}  // namespace te_graph::multi_tensor
