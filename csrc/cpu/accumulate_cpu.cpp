// Plain loops: the specification that the CUDA kernel is held to, and the recorder's backend.
#include <algorithm>
#include <cstring>

#include "multi_tensor/accumulate.h"

namespace te_graph::multi_tensor {
namespace {

struct BFloat16 {
    uint16_t bits;
};

float to_float(float value) { return value; }
float to_float(_Float16 value) { return static_cast<float>(value); }
float to_float(BFloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

template <typename T>
T from_float(float value) {
    return static_cast<T>(value);
}

// Round to nearest, ties to even; every NaN becomes the quiet NaN that torch writes.
template <>
BFloat16 from_float<BFloat16>(float value) {
    if (value != value) return {0x7FC0};
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
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
                return accumulate<_Float16, _Float16>;
            case DType::kBFloat16:
                return accumulate<BFloat16, BFloat16>;
        }
    }
    return source == DType::kFloat16 ? accumulate<_Float16, float> : accumulate<BFloat16, float>;
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
