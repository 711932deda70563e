// Inputs of the FP8 tests: the CPU loops are compared with double precision on them, the kernels with the CPU loops.
#pragma once

#include <cfloat>
#include <cstring>
#include <ostream>
#include <random>
#include <vector>

#include "accumulate_cases.h"
#include "fp8/cast.h"

namespace te_graph::fp8 {

using multi_tensor::GuardedTensor;

struct Shape {
    int64_t rows, columns;
};

constexpr Shape kShapes[] = {{768, 1024}, {256, 256}, {120, 2080}, {8, 8}, {1, 3221}, {2333, 1},
                             {1481, 677}, {1, 1},     {0, 5},      {5, 0}, {43, 256}, {130, 129}};
constexpr Shape kLargeShape{2048, 12288};  // on the device only
constexpr DType kInputs[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
// Ties are frequent with powers of two.
constexpr float kScales[] = {1, 0.37f, 16, 0.0078125f, 0, FLT_MAX, 1e-45f};

// Magnitudes from 2^-14 to 2^10, zeros and subnormals; with NaNs; with infinities and any other bits, too.
enum class Values { kFinite, kWithNan, kAny };
constexpr Values kAllValues[] = {Values::kFinite, Values::kWithNan, Values::kAny};

inline uint64_t random_bits(DType dtype, Values values, std::mt19937_64& generator) {
    const multi_tensor::Format format = multi_tensor::format_of(dtype);
    const uint64_t bits = generator(), choice = bits >> 32;
    const uint64_t fraction_and_sign = bits & (format.fraction_mask() | format.sign());
    if (choice % 64 == 0) return fraction_and_sign;
    if (choice % 64 == 1) return bits & format.sign();
    if (choice % 64 == 2 && values != Values::kFinite) return format.infinity() | fraction_and_sign | 1;
    if (choice % 64 == 3 && values == Values::kAny) return format.infinity() | (bits & format.sign());
    if (choice % 4 == 2 && values == Values::kAny) return bits & (2 * format.sign() - 1);
    const uint64_t exponent = format.largest_exponent() / 2 - 14 + (choice >> 8) % 24;
    return fraction_and_sign | exponent << (format.precision - 1);
}

// Equal bits, poison included, but for those of NaNs.
inline testing::AssertionResult same_numbers(GuardedTensor actual, const GuardedTensor& expected) {
    for (int64_t i = 0; i < expected.numel(); ++i) {
        const bool are_nan = actual.format().is_nan(actual.get(i)) && expected.format().is_nan(expected.get(i));
        if (are_nan) actual.set(i, expected.get(i));
    }
    return same_bytes(actual, expected);
}

// One matrix and what is made of it.
struct Matrix {
    Shape shape;
    DType dtype;
    Format format;
    float scale = 0.37f;
    Values values = Values::kAny;
    bool is_transposed = true, is_counted = false;
    bool is_bare = false;    // neither amax nor scale_inv
    bool is_padded = false;  // the transposed copy
    int64_t offset = 0;      // of the input, in elements, and of the casts from a multiple of 16 bytes
    float amax_before = 0;
};

inline std::ostream& operator<<(std::ostream& out, const Matrix& matrix) {
    return out << matrix.shape.rows << " x " << matrix.shape.columns << ' '
               << multi_tensor::format_of(matrix.dtype).name << " -> "
               << (matrix.format == Format::kE4M3 ? "e4m3" : "e5m2") << ", scale " << matrix.scale << ", offset "
               << matrix.offset << (matrix.is_transposed ? ", transposed" : "") << (matrix.is_padded ? ", padded" : "")
               << (matrix.is_counted ? ", counted" : "");
}

inline Matrix random_matrix(std::mt19937_64& generator) {
    return {.shape = {static_cast<int64_t>(generator() % 200), static_cast<int64_t>(generator() % 200)},
            .dtype = kInputs[generator() % 3],
            .format = kFormats[generator() % 2],
            .scale = kScales[generator() % std::size(kScales)],
            .values = kAllValues[generator() % 3],
            .is_transposed = generator() % 2 == 0,
            .is_bare = generator() % 8 == 0,
            .is_padded = generator() % 2 == 0,
            .offset = static_cast<int64_t>(generator() % 3)};
}

// Matrices with all that casts of them read and write, in one piece of memory with poison in between: a copy of it on
// the device is compared byte by byte.
class Problem {
public:
    void add(const Matrix& matrix, std::mt19937_64& generator) {
        const int64_t numel = matrix.shape.rows * matrix.shape.columns;
        const int bytes = multi_tensor::format_of(matrix.dtype).bytes;
        Places at{};
        at.input = place(numel * bytes, matrix.offset * bytes);
        at.out = place(numel, matrix.offset);
        const int64_t rows = matrix.is_padded ? padded(matrix.shape.rows) : matrix.shape.rows;
        at.out_t = place(rows * matrix.shape.columns, matrix.offset);
        at.counts = place(kCounts * sizeof(int64_t));
        at.scale = place(sizeof(float));
        at.scale_inv = place(sizeof(float));
        at.amax = place(sizeof(float));
        for (int64_t i = 0; i < numel; ++i) {
            const uint64_t bits = random_bits(matrix.dtype, matrix.values, generator);
            put(at.input + i * bytes, &bits, bytes);
        }
        const int64_t counts[kCounts] = {1, 2, 3};
        put(at.counts, counts, sizeof(counts));
        put(at.scale, &matrix.scale, sizeof(float));
        put(at.amax, &matrix.amax_before, sizeof(float));
        matrices_.push_back(matrix);
        places_.push_back(at);
    }

    // The casts in a copy of the memory at `base`, or in that of the host.
    std::vector<Cast> casts(char* base) const {
        std::vector<Cast> casts;
        for (size_t i = 0; i < matrices_.size(); ++i) {
            const Matrix& matrix = matrices_[i];
            const Places& at = places_[i];
            const auto pointer = [&]<typename T>(size_t place, T*, bool is_there) {
                return is_there ? reinterpret_cast<T*>(base + place) : nullptr;
            };
            constexpr uint8_t* kBytes = nullptr;
            constexpr float* kFloats = nullptr;
            constexpr int64_t* kIntegers = nullptr;
            casts.push_back({.input = base + at.input,
                             .out = pointer(at.out, kBytes, true),
                             .out_t = pointer(at.out_t, kBytes, matrix.is_transposed),
                             .scale = pointer(at.scale, kFloats, true),
                             .scale_inv = pointer(at.scale_inv, kFloats, !matrix.is_bare),
                             .amax = pointer(at.amax, kFloats, !matrix.is_bare),
                             .counts = pointer(at.counts, kIntegers, matrix.is_counted),
                             .rows = matrix.shape.rows,
                             .columns = matrix.shape.columns,
                             .dtype = matrix.dtype,
                             .format = matrix.format,
                             .pads_out_t = matrix.is_padded,
                             .reserved = {}});
        }
        return casts;
    }
    std::vector<Cast> casts() { return casts(reinterpret_cast<char*>(memory_.data())); }

    const std::vector<uint64_t>& memory() const { return memory_; }
    size_t bytes() const { return memory_.size() * sizeof(uint64_t); }

private:
    struct Places {
        size_t input, out, out_t, counts, scale, scale_inv, amax;
    };
    // At a multiple of 64 bytes and an offset, with at least as much poison behind.
    size_t place(size_t bytes, size_t offset = 0) {
        const size_t at = memory_.size() * sizeof(uint64_t) + offset;
        memory_.resize(memory_.size() + (offset + bytes + 127) / 64 * 8, 0xA5A5A5A5A5A5A5A5u);
        return at;
    }
    void put(size_t at, const void* value, size_t bytes) {
        std::memcpy(reinterpret_cast<char*>(memory_.data()) + at, value, bytes);
    }

    std::vector<Matrix> matrices_;
    std::vector<Places> places_;
    std::vector<uint64_t> memory_;
};

}  // namespace te_graph::fp8
