// Casts to FP8 and back on the CPU: the executable specification.
#include <algorithm>
#include <vector>

#include "fp8/cast.h"
#include "fp8/element_cpu.h"

namespace te_graph::fp8 {
namespace {

struct Findings {
    float amax = 0;
    int64_t counts[kCounts] = {};
};

template <typename T>
void cast_elements(const Cast& cast, Findings& findings) {
    const auto* const input = static_cast<const T*>(cast.input);
    const float scale = *cast.scale, largest = max_of(cast.format);
    for (int64_t row = 0; row < cast.rows; ++row) {
        for (int64_t column = 0; column < cast.columns; ++column) {
            const int64_t i = row * cast.columns + column;
            const float x = widen(input[i]), product = x * scale;
            const uint8_t result = to_fp8(product, cast.format);
            cast.out[i] = result;
            if (cast.out_t) cast.out_t[column * out_t_stride(cast) + row] = result;
            if (std::fabs(x) > findings.amax) findings.amax = std::fabs(x);
            findings.counts[kNotFinite] += !std::isfinite(x);
            findings.counts[kSaturated] += std::isfinite(x) && std::fabs(product) > largest;
            findings.counts[kUnderflowed] += x != 0 && scale != 0 && (result & 0x7F) == 0;
        }
    }
}

void pad_transposed(const Cast& cast) {
    for (int64_t column = 0; cast.out_t && column < cast.columns; ++column) {
        uint8_t* const out = cast.out_t + column * out_t_stride(cast);
        std::fill(out + cast.rows, out + out_t_stride(cast), to_fp8(0 * *cast.scale, cast.format));
    }
}

// Adds one element after the other to sums of 8 rows, these to sums of 128, and these to the sum.
template <typename T>
float column_sum(const T* input, const Cast& cast) {
    float sum = 0;
    for (int64_t tile = 0; tile < cast.rows; tile += kTile) {
        float tile_sum = 0;
        for (int64_t group = tile; group < std::min(tile + kTile, cast.rows); group += kGroupRows) {
            float group_sum = 0;
            for (int64_t row = group; row < std::min(group + kGroupRows, cast.rows); ++row) {
                group_sum += widen(input[row * cast.columns]);
            }
            tile_sum += group_sum;
        }
        sum += tile_sum;
    }
    return sum;
}

template <typename T>
void put(T& out, float sum, bool accumulate) {
    const T rounded = narrow<T>(sum);
    out = accumulate ? narrow<T>(widen(out) + widen(rounded)) : rounded;
}

}  // namespace

void cast_cpu(const Cast& cast, const Flag& noop) {
    if (is_set(noop)) return;
    Findings findings;
    with_input(cast.dtype, [&]<typename T>() { cast_elements<T>(cast, findings); });
    pad_transposed(cast);
    if (cast.amax && findings.amax > *cast.amax) *cast.amax = findings.amax;
    if (cast.scale_inv) *cast.scale_inv = 1 / *cast.scale;
    for (int i = 0; cast.counts && i < kCounts; ++i) cast.counts[i] += findings.counts[i];
}

void cast_transpose_cpu(const Cast& cast, const ColumnSums& sums, const Flag& noop) {
    cast_cpu(cast, noop);
    if (is_set(noop) || !sums.out) return;
    with_input(cast.dtype, [&]<typename T>() {
        for (int64_t column = 0; column < cast.columns; ++column) {
            const float sum = column_sum(static_cast<const T*>(cast.input) + column, cast);
            if (sums.dtype == DType::kFloat32) {
                put(static_cast<float*>(sums.out)[column], sum, sums.accumulate);
            } else {
                put(static_cast<T*>(sums.out)[column], sum, sums.accumulate);
            }
        }
    });
}

void cast_weights_cpu(std::span<const Cast> casts, const Flag& noop) {
    for (const Cast& cast : casts) cast_cpu(cast, noop);
}

void cast_weights_table_cpu(const CastTable& table, const Flag& noop) {
    for (int64_t i = 0; i < table.count; ++i) cast_cpu(table.casts[i], noop);
}

void dequantize_cpu(const Dequantization& work) {
    with_input(work.dtype, [&]<typename T>() {
        for (int64_t i = 0; i < work.numel; ++i) {
            static_cast<T*>(work.out)[i] = narrow<T>(widen(work.input[i], work.format) * *work.scale_inv);
        }
    });
}

}  // namespace te_graph::fp8
