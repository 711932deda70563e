// Sums of columns on the CPU, in the order of cast.h.
#pragma once

#include <algorithm>

#include "fp8/cast.h"
#include "fp8/element_cpu.h"

namespace te_graph::fp8 {

// One element after the other is added to sums of 8 rows, these to sums of 128, and these to the sum. column: [rows],
// `stride` elements apart.
template <typename T>
float column_sum(const T* column, int64_t rows, int64_t stride) {
    float sum = 0;
    for (int64_t tile = 0; tile < rows; tile += kTile) {
        float tile_sum = 0;
        for (int64_t group = tile; group < std::min(tile + kTile, rows); group += kGroupRows) {
            float group_sum = 0;
            for (int64_t row = group; row < std::min(group + kGroupRows, rows); ++row) {
                group_sum += widen(column[row * stride]);
            }
            tile_sum += group_sum;
        }
        sum += tile_sum;
    }
    return sum;
}

// matrix: [rows, columns] -> sums.out.
template <typename T>
void column_sums_cpu(const T* matrix, int64_t rows, int64_t columns, const ColumnSums& sums) {
    if (!sums.out) return;
    with_dtype(sums.dtype, [&]<typename Out>() {
        auto* const out = static_cast<Out*>(sums.out);
        for (int64_t column = 0; column < columns; ++column) {
            const Out rounded = narrow<Out>(column_sum(matrix + column, rows, columns));
            out[column] = sums.accumulate ? narrow<Out>(widen(out[column]) + widen(rounded)) : rounded;
        }
    });
}

}  // namespace te_graph::fp8
