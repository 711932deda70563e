// Elements of tensors on the CPU: the dtypes, and their conversions written out bit by bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/dtype.h"

namespace te_graph {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(BFloat16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }
inline float widen(Float16 value) {
    const uint32_t sign = (value.bits & 0x8000u) << 16;
    const uint32_t exponent = (value.bits >> 10) & 0x1F;
    const uint32_t mantissa = value.bits & 0x3FF;
    if (exponent == 0x1F) return as_float(sign | 0x7F800000 | mantissa << 13);
    if (exponent == 0) {
        const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
        return sign ? -magnitude : magnitude;
    }
    return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

// The type that elements of T are computed in: fp64 for fp64, else fp32.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The fp32 number from which any narrower format rounds as it would from `value`: towards zero, with the last bit set
// if anything was lost.
inline float to_odd(double value) {
    float rounded = static_cast<float>(value);
    if (rounded != rounded || rounded == value) return rounded;
    if (std::fabs(static_cast<double>(rounded)) > std::fabs(value)) rounded = std::nextafter(rounded, 0.0f);
    return as_float(bits_of(rounded) | 1);
}

// Round to nearest, ties to even; every NaN becomes one quiet NaN.
inline BFloat16 to_bfloat16(float value) {
    if (value != value) return {0x7FC0};
    const uint32_t bits = bits_of(value);
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

inline Float16 to_float16(float value) {
    const auto sign = static_cast<uint16_t>(bits_of(value) >> 16 & 0x8000);
    const float magnitude = std::fabs(value);
    const auto with_sign = [sign](uint32_t bits) { return Float16{static_cast<uint16_t>(sign | bits)}; };
    if (value != value) return {0x7E00};
    if (magnitude >= 65520.0f) return with_sign(0x7C00);  // half way from the largest number to the next
    // Below 2^-14 numbers are multiples of 2^-24; nearbyint rounds ties to even.
    if (magnitude < 0x1p-14f) return with_sign(static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f)));
    const uint32_t bits = bits_of(magnitude);
    return with_sign(((bits + 0xFFF + ((bits >> 13) & 1)) >> 13) - (112u << 10));
}

template <typename T, typename From>
T narrow(From value) {
    if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
        float single;
        if constexpr (std::is_same_v<From, double>) {
            single = to_odd(value);
        } else {
            single = value;
        }
        if constexpr (std::is_same_v<T, BFloat16>) {
            return to_bfloat16(single);
        } else {
            return to_float16(single);
        }
    } else {
        return static_cast<T>(value);
    }
}

// Calls function.operator()<T>() with the type of `dtype`.
template <typename Function>
void with_type(DType dtype, const Function& function) {
    switch (dtype) {
        case DType::kFloat32:
            return function.template operator()<float>();
        case DType::kFloat64:
            return function.template operator()<double>();
        case DType::kFloat16:
            return function.template operator()<Float16>();
        case DType::kBFloat16:
            return function.template operator()<BFloat16>();
    }
}

}  // namespace te_graph
