// A sum of non-negative doubles without rounding, hence independent of the order and grouping of its terms. No Torch
// here.
//
// A fixed-point number over the whole range of fp64: limb i counts units of 2^(32 i - 1074) in 64 bits, of which a
// term fills 32, so 2^31 terms fit before a limb becomes negative as int64.
//
// A partial is such a sum in memory: the norm of a part of the tensors, before its root is taken. Partials are added
// limb by limb, in any order: by atomics, by all_reduce(SUM), on any number of devices. `sum_squares` is one of p = 2.
//
// Infinite and NaN terms are counted apart: the sum is NaN if there was a NaN, else infinite if there was an infinity.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace te_graph::multi_tensor {

// Words of a partial, int64 each.
constexpr int kLimbs = 68;  // 66 cover fp64 from 2^-1074 to 2^1024, two more the carries of 2^31 terms
constexpr int kInfinities = 68;
constexpr int kNaNs = 69;
constexpr int kTicket = 70;  // blocks that are done; zero between launches
constexpr int kPartialWords = 72;

// `term` as at most three 32-bit digits, the lowest in limb `first`.
struct Digits {
    int first;
    uint32_t values[3];
};

TE_GRAPH_HOST_DEVICE inline uint64_t double_bits(double value) {
#ifdef __CUDA_ARCH__
    return static_cast<uint64_t>(__double_as_longlong(value));
#else
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
#endif
}

// term: finite, not negative.
TE_GRAPH_HOST_DEVICE inline Digits digits_of(double term) {
    const uint64_t bits = double_bits(term);
    const int exponent = static_cast<int>(bits >> 52);
    const uint64_t fraction = bits & ((uint64_t{1} << 52) - 1);
    const uint64_t mantissa = exponent == 0 ? fraction : fraction | uint64_t{1} << 52;
    const int lowest = exponent == 0 ? 0 : exponent - 1;  // the mantissa's unit is 2^(lowest - 1074)
    const int shift = lowest % 32;
    const uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
    const uint64_t low = mantissa << shift;
    return {lowest / 32, {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)}};
}

// Adds one term with `add(word, amount)`.
template <typename Add>
TE_GRAPH_HOST_DEVICE void add_exactly(double term, const Add& add) {
    if (!(term <= 1.7976931348623157e308)) {
        add(term != term ? kNaNs : kInfinities, uint64_t{1});
        return;
    }
    const Digits digits = digits_of(term);
    for (int i = 0; i < 3; ++i) {
        if (digits.values[i] != 0) add(digits.first + i, uint64_t{digits.values[i]});
    }
}

// The sum that `partial` [kPartialWords] holds, rounded to nearest, ties to even. Below 2^-1022 it may be rounded
// twice. Carries are moved up in `partial`, which holds the same number afterwards.
TE_GRAPH_HOST_DEVICE inline double rounded_sum(uint64_t* partial) {
    if (partial[kNaNs] != 0) return std::nan("");
    if (partial[kInfinities] != 0) return HUGE_VAL;
    uint64_t carry = 0;
    int high = -1;  // the highest limb that is not zero
    for (int i = 0; i < kLimbs; ++i) {
        const uint64_t value = partial[i] + carry;
        partial[i] = value & 0xFFFFFFFFu;
        carry = value >> 32;
        if (partial[i] != 0) high = i;
    }
    if (high < 0) return 0.0;
    uint64_t leading = partial[high] << 32 | (high > 0 ? partial[high - 1] : 0);
    const auto below = static_cast<uint32_t>(high > 1 ? partial[high - 2] : 0);
    int shift = 0;
    for (; leading >> 63 == 0; ++shift) leading <<= 1;
    if (shift > 0) leading |= below >> (32 - shift);
    bool is_inexact = static_cast<uint32_t>(below << shift) != 0;
    for (int i = 0; i < high - 2; ++i) is_inexact |= partial[i] != 0;
    // The lowest of 64 bits, of which 53 are kept, tells on which side of a tie the number lies.
    leading |= is_inexact ? 1 : 0;
    return ldexp(static_cast<double>(leading), 32 * (high - 1) - 1074 - shift);
}

}  // namespace te_graph::multi_tensor
