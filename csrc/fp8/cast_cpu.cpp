// Casts to FP8 and back on the CPU: the executable specification.
#include <algorithm>
#include <vector>

#include "fp8/cast.h"
#include "fp8/column_sums_cpu.h"
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

}  // namespace

void cast_cpu(const Cast& cast, const Flag& noop) {
    if (is_set(noop)) return;
    Findings findings;
    with_dtype(cast.dtype, [&]<typename T>() { cast_elements<T>(cast, findings); });
    pad_transposed(cast);
    if (cast.amax && findings.amax > *cast.amax) *cast.amax = findings.amax;
    if (cast.scale_inv) *cast.scale_inv = 1 / *cast.scale;
    for (int i = 0; cast.counts && i < kCounts; ++i) cast.counts[i] += findings.counts[i];
}

void cast_transpose_cpu(const Cast& cast, const ColumnSums& sums, const Flag& noop) {
    cast_cpu(cast, noop);
    if (is_set(noop)) return;
    with_dtype(cast.dtype, [&]<typename T>() {
        column_sums_cpu(static_cast<const T*>(cast.input), cast.rows, cast.columns, sums);
    });
}

void cast_weights_cpu(std::span<const Cast> casts, const Flag& noop) {
    for (const Cast& cast : casts) cast_cpu(cast, noop);
}

void cast_weights_table_cpu(const CastTable& table, const Flag& noop) {
    for (int64_t i = 0; i < table.count; ++i) cast_cpu(table.casts[i], noop);
}

void dequantize_cpu(const Dequantization& work) {
    with_dtype(work.dtype, [&]<typename T>() {
        for (int64_t i = 0; i < work.numel; ++i) {
            static_cast<T*>(work.out)[i] = narrow<T>(widen(work.input[i], work.format) * *work.scale_inv);
        }
    });
}

}  // namespace te_graph::fp8
