// Layer norm and RMS norm on the CPU: the executable specification.
#include <array>
#include <cmath>
#include <vector>

#include "fp8/column_sums_cpu.h"
#include "fp8/layer_norm.h"

namespace te_graph::fp8 {
namespace {

// Of element(0), ... element(columns - 1).
template <typename Element>
float row_sum(int64_t columns, const Element& element) {
    std::array<float, kRowLanes> lanes{};
    for (int64_t column = 0; column < columns; ++column) lanes[column / 8 % kRowLanes] += element(column);
    for (int apart = kRowLanes / 2; apart > 0; apart /= 2) {
        for (int lane = 0; lane < apart; ++lane) lanes[lane] += lanes[lane + apart];
    }
    return lanes[0];
}

// Of weight_dtype, [columns].
std::vector<float> widened(const void* values, DType dtype, int64_t columns) {
    std::vector<float> result(columns);
    with_dtype(dtype, [&]<typename T>() {
        for (int64_t i = 0; i < columns; ++i) result[i] = widen(static_cast<const T*>(values)[i]);
    });
    return result;
}

// g: [columns].
std::vector<float> gain_of(const LayerNorm& work) {
    std::vector<float> gain = widened(work.weight, work.weight_dtype, work.columns);
    for (float& g : gain) g = work.zero_centered ? 1.0f + g : g;
    return gain;
}

// A row of n.
template <typename T>
struct Normalized {
    const T* sum;  // [columns]
    float mean, rstd;
    Normalized(const LayerNorm& work, int64_t row)
        : sum(static_cast<const T*>(work.sum) + row * work.columns),
          mean(work.mean ? work.mean[row] : 0.0f),
          rstd(work.rstd[row]) {}
    float operator()(int64_t column) const { return (widen(sum[column]) - mean) * rstd; }
};

// y.
template <typename T>
std::vector<T> made(const LayerNorm& work) {
    const std::vector<float> gain = gain_of(work);
    const std::vector<float> bias =
        work.bias ? widened(work.bias, work.weight_dtype, work.columns) : std::vector<float>();
    std::vector<T> y(work.rows * work.columns);
    for (int64_t row = 0; row < work.rows; ++row) {
        const Normalized<T> n(work, row);
        for (int64_t i = 0; i < work.columns; ++i) {
            const float scaled = n(i) * gain[i];
            y[row * work.columns + i] = narrow<T>(work.bias ? scaled + bias[i] : scaled);
        }
    }
    return y;
}

}  // namespace

void layer_norm_stats_cpu(const LayerNormStats& work) {
    with_dtype(work.dtype, [&]<typename T>() {
        for (int64_t row = 0; row < work.rows; ++row) {
            const int64_t first = row * work.columns;
            const T* sum = static_cast<const T*>(work.x) + first;
            if (work.residual) {
                const T* const residual = static_cast<const T*>(work.residual) + first;
                T* const written = static_cast<T*>(work.sum) + first;
                for (int64_t i = 0; i < work.columns; ++i) written[i] = narrow<T>(widen(sum[i]) + widen(residual[i]));
                sum = written;
            }
            const auto columns = static_cast<float>(work.columns);
            float mean = 0;
            if (work.mean) mean = row_sum(work.columns, [&](int64_t i) { return widen(sum[i]); }) / columns;
            const float squares = row_sum(work.columns, [&](int64_t i) {
                const float apart = widen(sum[i]) - mean;
                return apart * apart;
            });
            if (work.mean) work.mean[row] = mean;
            work.rstd[row] = 1.0f / std::sqrt(squares / columns + work.eps);
        }
    });
}

void layer_norm_cast_cpu(const LayerNorm& work, const Cast& cast) {
    with_dtype(work.dtype, [&]<typename T>() {
        const std::vector<T> y = made<T>(work);
        Cast of_y = cast;
        of_y.input = y.data();
        cast_cpu(of_y, {});
    });
}

void layer_norm_current_scale_cpu(const LayerNorm& work, const CurrentScale& scale) {
    with_dtype(work.dtype, [&]<typename T>() {
        const std::vector<T> y = made<T>(work);
        CurrentScale of_y = scale;
        of_y.input = y.data();
        current_scale_cpu(of_y);
    });
}

void layer_norm_backward_cpu(const LayerNormBackward& work, const Cast& cast, const ColumnSums& sums) {
    const LayerNorm& norm = work.norm;
    const std::vector<float> gain = gain_of(norm);
    const int64_t columns = norm.columns;
    const float share = 1.0f / static_cast<float>(columns);
    with_dtype(norm.dtype, [&]<typename T>() {
        std::vector<float> weight_terms(norm.rows * columns);
        for (int64_t row = 0; row < norm.rows; ++row) {
            const Normalized<T> n(norm, row);
            const T* const dy = static_cast<const T*>(work.grad) + row * columns;
            const T* const more = work.grad_sum ? static_cast<const T*>(work.grad_sum) + row * columns : nullptr;
            T* const ds = static_cast<T*>(work.grad_x) + row * columns;
            const auto dn = [&](int64_t i) { return widen(dy[i]) * gain[i]; };
            const float along = row_sum(columns, [&](int64_t i) { return dn(i) * n(i); });
            const float level = norm.mean ? row_sum(columns, dn) : 0.0f;
            for (int64_t i = 0; i < columns; ++i) {
                const float shift = n(i) * along;
                const float mean = (norm.mean ? shift + level : shift) * share;
                ds[i] = narrow<T>((dn(i) - mean) * n.rstd);
                if (more) ds[i] = narrow<T>(widen(ds[i]) + widen(more[i]));
                weight_terms[row * columns + i] = widen(dy[i]) * n(i);
            }
        }
        column_sums_cpu(weight_terms.data(), norm.rows, columns, work.weight_sums);
        column_sums_cpu(static_cast<const T*>(work.grad), norm.rows, columns, work.bias_sums);
        Cast of_ds = cast;
        of_ds.input = work.grad_x;
        if (work.is_cast) cast_cpu(of_ds, {});
        column_sums_cpu(static_cast<const T*>(work.grad_x), norm.rows, columns, sums);
    });
}

}  // namespace te_graph::fp8
