// Plain loops: the specification that the CUDA kernel is held to, and the recorder's backend.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "multi_tensor/accumulate.h"

namespace te_graph::multi_tensor {
namespace {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

float to_float(float value) { return value; }
float to_float(BFloat16 value) { return as_float(static_cast<uint32_t>(value.bits) << 16); }
float to_float(Float16 value) {
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

template <typename T>
T from_float(float value) {
    return value;
}

// Round to nearest, ties to even; every NaN becomes one quiet NaN.
template <>
BFloat16 from_float<BFloat16>(float value) {
    if (value != value) return {0x7FC0};
    const uint32_t bits = bits_of(value);
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

template <>
Float16 from_float<Float16>(float value) {
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

template <typename Source, typename Destination>
void accumulate(const void* source, void* destination, int64_t begin, int64_t end, Mode mode) {
    const auto* from = static_cast<const Source*>(source);
    auto* to = static_cast<Destination*>(destination);
    if constexpr (std::is_same_v<Source, Destination>) {
        if (mode == Mode::kStore) {
            std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(Source));
            return;
        }
    }
    for (int64_t i = begin; i < end; ++i) {
        if constexpr (std::is_same_v<Source, double>) {
            to[i] += from[i];
        } else {
            const float addend = to_float(from[i]);
            to[i] = from_float<Destination>(mode == Mode::kAdd ? to_float(to[i]) + addend : addend);
        }
    }
}

using Function = void (*)(const void*, void*, int64_t, int64_t, Mode);

Function select(DType source, DType destination) {
    if (source == destination) {
        switch (source) {
            case DType::kFloat32:
                return accumulate<float, float>;
            case DType::kFloat64:
                return accumulate<double, double>;
            case DType::kFloat16:
                return accumulate<Float16, Float16>;
            case DType::kBFloat16:
                return accumulate<BFloat16, BFloat16>;
        }
    }
    return source == DType::kFloat16 ? accumulate<Float16, float> : accumulate<BFloat16, float>;
}

}  // namespace

void accumulate_cpu(const Entry* table, const Chunk* chunks, int64_t num_chunks) {
    for (int64_t i = 0; i < num_chunks; ++i) {
        const Entry& entry = table[chunks[i].entry];
        if (entry.mode == Mode::kSkip) continue;
        const int64_t begin = chunks[i].index * kChunkElements;
        const int64_t end = std::min(entry.numel, begin + kChunkElements);
        select(entry.source_dtype, entry.destination_dtype)(entry.source, entry.destination, begin, end, entry.mode);
    }
}

void update_entries_cpu(Entry* table, const EntryUpdate* updates, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        Entry& entry = table[updates[i].entry];
        entry.destination = updates[i].destination;
        entry.mode = updates[i].mode;
    }
}

}  // namespace te_graph::multi_tensor
