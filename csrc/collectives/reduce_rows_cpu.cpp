// Sums of rows on the CPU, with the bits of the kernels but for the payloads of NaNs.
#include "collectives/protocols.h"
#include "common/element_cpu.h"

#include <cmath>

namespace te_graph::collectives {
namespace {

float combine(Reduction reduction, float a, float b) {
    if (reduction == Reduction::kSum) return a + b;
    if (a != a || b != b) return a != a ? a : b;
    if (a == b) return std::signbit(a) ? b : a;  // +0 is above -0
    return a > b ? a : b;
}

template <typename T, typename Out>
void reduce(const Rows& work) {
    const auto* const rows = static_cast<const T*>(work.rows);
    auto* const out = static_cast<Out*>(work.out);
    const float scale = work.scale_tensor ? work.scale * *work.scale_tensor : work.scale;
    for (int64_t i = 0; i < work.columns; ++i) {
        float sum = widen(rows[i]);
        for (int row = 1; row < work.ranks; ++row) {
            sum = combine(work.reduction, sum, widen(rows[row * work.columns + i]));
        }
        if (work.reduction == Reduction::kSum) sum *= scale;
        out[i] = narrow<Out>(work.is_rounded ? widen(narrow<T>(sum)) : sum);
    }
}

}  // namespace

void reduce_rows_cpu(const Rows& rows) {
    if (rows.element == Element::kFloat16) return reduce<Float16, Float16>(rows);
    if (rows.element == Element::kFloat32) return reduce<float, float>(rows);
    if (rows.out_element == Element::kFloat32) return reduce<BFloat16, float>(rows);
    reduce<BFloat16, BFloat16>(rows);
}

}  // namespace te_graph::collectives
