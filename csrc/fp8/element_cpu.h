// FP8 numbers on the CPU, bit by bit.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/element_cpu.h"
#include "fp8/format.h"

namespace te_graph::fp8 {

using te_graph::widen;  // beside those of FP8 numbers

// Round to nearest, ties to even; what is larger than the format's largest number becomes that.
template <int kMantissa, int kBias>
uint8_t to_fp8(float value, float largest) {
    if (value != value) return 0x7F;
    const auto sign = static_cast<uint8_t>(bits_of(value) >> 24 & 0x80);
    const float magnitude = std::min(std::fabs(value), largest);
    // Below the smallest normal number, 2^(1 - bias), numbers are multiples of 2^(1 - bias - mantissa).
    if (magnitude < std::ldexp(1.0f, 1 - kBias)) {
        return sign | static_cast<uint8_t>(std::nearbyint(std::ldexp(magnitude, kMantissa + kBias - 1)));
    }
    constexpr int kShift = 23 - kMantissa;
    const uint32_t bits = bits_of(magnitude);
    const uint32_t rounded = bits + ((1u << (kShift - 1)) - 1) + (bits >> kShift & 1);
    return sign | static_cast<uint8_t>((rounded >> kShift) - ((127u - kBias) << kMantissa));
}

inline uint8_t to_fp8(float value, Format format) {
    return format == Format::kE4M3 ? to_fp8<3, 7>(value, max_of(format)) : to_fp8<2, 15>(value, max_of(format));
}

inline float widen(uint8_t bits, Format format) {
    // The upper byte of an fp16 number.
    if (format == Format::kE5M2) return widen(Float16{static_cast<uint16_t>(bits << 8)});
    const uint32_t exponent = bits >> 3 & 0xF, mantissa = bits & 7;
    float magnitude;
    if ((bits & 0x7F) == 0x7F) {
        magnitude = as_float(0x7FC00000);
    } else if (exponent == 0) {
        magnitude = std::ldexp(static_cast<float>(mantissa), -9);
    } else {
        magnitude = as_float((exponent + 120) << 23 | mantissa << 20);
    }
    return bits & 0x80 ? -magnitude : magnitude;
}

// Calls function.operator()<T>() with the type of `dtype`, which is no fp64.
template <typename Function>
void with_dtype(DType dtype, const Function& function) {
    switch (dtype) {
        case DType::kFloat16:
            return function.template operator()<Float16>();
        case DType::kBFloat16:
            return function.template operator()<BFloat16>();
        default:
            return function.template operator()<float>();
    }
}

}  // namespace te_graph::fp8
