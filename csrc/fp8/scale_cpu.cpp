// Scales on the CPU: the executable specification.
#include "fp8/element_cpu.h"
#include "fp8/scale.h"

namespace te_graph::fp8 {
namespace {

void update_column(const Update& update, int column) {
    const auto history = [&](int row) -> float& {
        return update.history[row * update.row_stride + column * update.column_stride];
    };
    const float newest = history(0);
    const bool is_left_out = update.skip_nonfinite && !(newest <= FLT_MAX);
    if (newest != 0 && !is_left_out) {
        float amax = newest;
        if (!update.most_recent) {
            amax = 0;
            for (int row = 0; row < update.height; ++row) amax = history(row) > amax ? history(row) : amax;
        }
        update.scale[column] = next_scale(amax, update.scaled_max, update.scale[column]);
        for (int row = 1; row < update.height - 1; ++row) history(row) = history(row + 1);
        history(update.height - 1) = newest;
    }
    history(0) = 0;
}

}  // namespace

void amax_and_scale_update_cpu(const Update& update) {
    const bool for_weights = update.flag.data ? is_set(update.flag) : update.update_weight_scale_inv;
    for (int column = 0; column < update.columns; ++column) {
        update_column(update, column);
        if (for_weights || !update.mask.data || update.mask[column]) {
            update.scale_inv[column] = 1 / update.scale[column];
        }
    }
}

void current_scale_cpu(const CurrentScale& work) {
    with_dtype(work.dtype, [&]<typename T>() {
        float amax = 0;
        for (int64_t i = 0; i < work.numel; ++i) {
            const float x = std::fabs(widen(static_cast<const T*>(work.input)[i]));
            if (!(x <= amax) && amax == amax) amax = x;
        }
        *work.amax = amax != amax ? as_float(0x7FC00000) : amax;
        *work.scale = scale_of(*work.amax, work.rule);
    });
}

void scale_cpu(const float* amax, float* scale, int64_t count, const ScaleRule& rule) {
    for (int64_t i = 0; i < count; ++i) scale[i] = scale_of(amax[i], rule);
}

}  // namespace te_graph::fp8
