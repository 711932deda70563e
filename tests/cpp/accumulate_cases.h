// Inputs of the accumulate tests: the CPU loops are compared with a reference on them, the kernel with the CPU loops.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <ostream>
#include <random>
#include <stdexcept>
#include <vector>

#include "multi_tensor/accumulate.h"
#include "seed.h"

namespace te_graph::multi_tensor {

// How a dtype lays out its bits: sign, exponent, then a fraction of precision - 1 bits.
struct Format {
    const char* name;
    int bytes;
    int precision;
    int exponent_bits;

    uint64_t fraction_mask() const { return (uint64_t{1} << (precision - 1)) - 1; }
    uint64_t largest_exponent() const { return (uint64_t{1} << exponent_bits) - 1; }
    uint64_t infinity() const { return largest_exponent() << (precision - 1); }
    uint64_t sign() const { return uint64_t{1} << (8 * bytes - 1); }
    bool is_nan(uint64_t bits) const { return (bits & (sign() - 1)) > infinity(); }
};

inline Format format_of(DType dtype) {
    switch (dtype) {
        case DType::kFloat32:
            return {"fp32", 4, 24, 8};
        case DType::kFloat64:
            return {"fp64", 8, 53, 11};
        case DType::kFloat16:
            return {"fp16", 2, 11, 5};
        case DType::kBFloat16:
            return {"bf16", 2, 8, 8};
    }
    throw std::invalid_argument("no such dtype");
}

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

struct Pair {
    DType source, destination;
};
constexpr Pair kPairs[] = {
    {DType::kFloat32, DType::kFloat32},   {DType::kFloat64, DType::kFloat64}, {DType::kFloat16, DType::kFloat16},
    {DType::kBFloat16, DType::kBFloat16}, {DType::kFloat16, DType::kFloat32}, {DType::kBFloat16, DType::kFloat32},
};

// Others, which ops store only and tables may name with any mode.
constexpr Pair kRarePairs[] = {
    {DType::kFloat16, DType::kBFloat16}, {DType::kBFloat16, DType::kFloat16}, {DType::kFloat32, DType::kFloat64},
    {DType::kFloat16, DType::kFloat64},  {DType::kBFloat16, DType::kFloat64}, {DType::kFloat64, DType::kFloat32},
    {DType::kFloat64, DType::kFloat16},  {DType::kFloat64, DType::kBFloat16},
};

// Bits of a finite number: mostly of magnitudes that lose bits when added, now and then any finite pattern, subnormal
// and close to overflow included.
inline uint64_t random_finite(const Format& format, std::mt19937_64& generator) {
    const uint64_t bits = generator();
    const uint64_t fraction_and_sign = bits & (format.fraction_mask() | format.sign());
    const uint64_t anywhere = generator() % format.largest_exponent();
    const uint64_t near_one = format.largest_exponent() / 2 - 4 + generator() % 8;
    return fraction_and_sign | ((generator() % 4 == 0 ? anywhere : near_one) << (format.precision - 1));
}

// [numel] elements in memory of their own, `offset` elements behind a 64-byte boundary, with poison on both sides.
class GuardedTensor {
public:
    GuardedTensor(DType dtype, int64_t numel, int64_t offset)
        : dtype_(dtype), numel_(numel), offset_(offset), lines_(3 + (offset + numel) * format().bytes / 64) {
        std::memset(lines_.data(), 0xA5, bytes());
    }

    static GuardedTensor random(DType dtype, int64_t numel, int64_t offset, std::mt19937_64& generator) {
        GuardedTensor tensor(dtype, numel, offset);
        for (int64_t i = 0; i < numel; ++i) tensor.set(i, random_finite(tensor.format(), generator));
        return tensor;
    }

    Format format() const { return format_of(dtype_); }
    DType dtype() const { return dtype_; }
    int64_t numel() const { return numel_; }

    // All of the memory, poison included, and where in it the elements start.
    void* memory() { return lines_.data(); }
    const void* memory() const { return lines_.data(); }
    size_t bytes() const { return lines_.size() * sizeof(CacheLine); }
    size_t first_byte() const { return sizeof(CacheLine) + offset_ * format().bytes; }

    void* data() { return static_cast<char*>(memory()) + first_byte(); }
    const void* data() const { return static_cast<const char*>(memory()) + first_byte(); }

    uint64_t get(int64_t i) const {
        uint64_t bits = 0;
        std::memcpy(&bits, static_cast<const char*>(data()) + i * format().bytes, format().bytes);
        return bits;
    }
    void set(int64_t i, uint64_t bits) {
        std::memcpy(static_cast<char*>(data()) + i * format().bytes, &bits, format().bytes);
    }

private:
    struct alignas(64) CacheLine {
        char bytes[64];
    };
    DType dtype_;
    int64_t numel_, offset_;
    std::vector<CacheLine> lines_;
};

// Equal in every byte, poison included.
inline testing::AssertionResult same_bytes(const GuardedTensor& actual, const GuardedTensor& expected) {
    if (std::memcmp(actual.memory(), expected.memory(), expected.bytes()) == 0) return testing::AssertionSuccess();
    for (int64_t i = 0; i < expected.numel(); ++i) {
        if (actual.get(i) == expected.get(i)) continue;
        return testing::AssertionFailure() << "element " << i << " of " << expected.numel() << ": expected bits "
                                           << std::hex << expected.get(i) << ", got " << actual.get(i);
    }
    return testing::AssertionFailure() << "memory outside of the tensor was written";
}

struct Case {
    Pair pair;
    Mode mode;
    int64_t numel, source_offset, destination_offset;
};

inline std::ostream& operator<<(std::ostream& out, const Case& now) {
    constexpr const char* kModes[] = {"skip", "store", "add"};
    return out << kModes[static_cast<int>(now.mode)] << ' ' << now.numel << ' ' << format_of(now.pair.source).name
               << " at offset " << now.source_offset << " -> " << format_of(now.pair.destination).name << " at offset "
               << now.destination_offset;
}

constexpr int64_t kSizes[] = {0,
                              1,
                              2,
                              7,
                              8,
                              13,
                              257,
                              kChunkElements - 1,
                              kChunkElements,
                              kChunkElements + 1,
                              2 * kChunkElements,
                              3 * kChunkElements + 61};

// Every pair, mode and size, with 16-byte alignment of both, one or none of the tensors.
inline std::vector<Case> all_cases() {
    constexpr int64_t kOffsets[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {3, 5}};
    std::vector<Case> cases;
    for (const Mode mode : {Mode::kSkip, Mode::kStore, Mode::kAdd}) {
        for (const Pair pair : kPairs) {
            for (const int64_t numel : kSizes) {
                for (const auto& offset : kOffsets) cases.push_back({pair, mode, numel, offset[0], offset[1]});
            }
        }
        for (const Pair pair : kRarePairs) {
            for (const int64_t numel : {int64_t{1}, int64_t{257}, kChunkElements + 1}) {
                cases.push_back({pair, mode, numel, 1, 3});
            }
        }
    }
    return cases;
}

inline TableEntry entry_of(const GuardedTensor& source, GuardedTensor& destination, Mode mode) {
    return {source.data(), destination.data(), source.numel(), source.dtype(), destination.dtype(), mode, {}};
}

// Runs the CPU loops over the whole of each entry.
inline void accumulate_on_cpu(const std::vector<TableEntry>& table) {
    accumulate_cpu({.entries = table.data(), .count = static_cast<int64_t>(table.size())}, {});
}

}  // namespace te_graph::multi_tensor
