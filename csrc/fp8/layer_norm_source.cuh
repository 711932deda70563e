// Elements of layer norms and of their derivatives, made where they are cast.
#pragma once

#include "fp8/cast_tile.cuh"
#include "fp8/layer_norm.h"

namespace te_graph::fp8 {

// Eight of `values`, T [columns], from `column` on.
template <typename T>
__device__ Vector<float, 8> widened_eight(const void* values, int64_t column) {
    const Vector<T, 8> loaded = load_eight<true>(static_cast<const T*>(values) + column, 1);
    Vector<float, 8> eight;
#pragma unroll
    for (int k = 0; k < 8; ++k) eight.values[k] = widen(loaded.values[k]);
    return eight;
}
__device__ inline Vector<float, 8> eight_of(const void* values, DType dtype, int64_t column) {
    Vector<float, 8> eight;
    with_dtype(dtype, [&]<typename T>() { eight = widened_eight<T>(values, column); });
    return eight;
}

// g, from `column` on; W: the weight's type.
template <typename W>
__device__ Vector<float, 8> gain_of(const LayerNorm& work, int64_t column) {
    Vector<float, 8> gain = widened_eight<W>(work.weight, column);
#pragma unroll
    for (int k = 0; k < 8; ++k) gain.values[k] = work.zero_centered ? __fadd_rn(1.0f, gain.values[k]) : gain.values[k];
    return gain;
}
__device__ inline Vector<float, 8> gain_of(const LayerNorm& work, int64_t column) {
    Vector<float, 8> gain;
    with_dtype(work.weight_dtype, [&]<typename W>() { gain = gain_of<W>(work, column); });
    return gain;
}

// What all elements of a row have in common.
struct Row {
    float mean, rstd;
    __device__ Row(const LayerNorm& work, int64_t row)
        : mean(work.mean ? work.mean[row] : 0.0f), rstd(work.rstd[row]) {}
    template <typename T>
    __device__ float normalized(T sum) const {
        return __fmul_rn(__fsub_rn(widen(sum), mean), rstd);
    }
};

// Eights of y, from `position` on.
template <typename T>
struct LayerNormSource {
    using Loaded = Vector<T, 8>;
    static constexpr int kLoads = 1;

    const LayerNorm& work;
    const T* sum;
    int64_t row;
    Vector<float, 8> gain{}, bias{};
    __device__ LayerNormSource(const LayerNorm& work, const Position& position)
        : work(work),
          sum(static_cast<const T*>(work.sum) + position.row * work.columns + position.column),
          row(position.row) {
        if (position.column >= work.columns) return;
        gain = gain_of(work, position.column);
        if (work.bias) bias = eight_of(work.bias, work.weight_dtype, position.column);
    }

    template <bool kAligned>
    __device__ Loaded load(int i, int64_t end) const {
        return load_eight<kAligned>(sum + i * work.columns, end);
    }
    __device__ Vector<T, 8> make(int i, const Loaded& loaded, bool is_inside) const {
        Vector<T, 8> y{};
        if (!is_inside) return y;
        const Row at(work, row + i);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float scaled = __fmul_rn(at.normalized(loaded.values[k]), gain.values[k]);
            y.values[k] = narrow<T>(work.bias ? __fadd_rn(scaled, bias.values[k]) : scaled);
        }
        return y;
    }
};

// Eights of ds, which are written, too, and what they add to the column sums of dy * n and of dy.
template <typename T>
struct LayerNormBackwardSource {
    struct Loaded {
        Vector<T, 8> sum, grad, grad_sum;
    };
    static constexpr int kLoads = 3;

    const LayerNormBackward& work;
    int64_t first, row;  // of the matrices' elements; of their rows
    Vector<float, 8> gain{}, weight_sums{}, bias_sums{};
    __device__ LayerNormBackwardSource(const LayerNormBackward& work, const Position& position)
        : work(work), first(position.row * work.norm.columns + position.column), row(position.row) {
        if (position.column < work.norm.columns) gain = gain_of(work.norm, position.column);
    }

    template <bool kAligned>
    __device__ Loaded load(int i, int64_t end) const {
        const int64_t at = first + i * work.norm.columns;
        return {load_eight<kAligned>(static_cast<const T*>(work.norm.sum) + at, end),
                load_eight<kAligned>(static_cast<const T*>(work.grad) + at, end),
                load_eight<kAligned>(static_cast<const T*>(work.grad_sum) + at, work.grad_sum ? end : 0)};
    }
    __device__ Vector<T, 8> make(int i, const Loaded& loaded, bool is_inside) {
        Vector<T, 8> ds{};
        if (!is_inside) return ds;
        const Row at(work.norm, row + i);
        const float along = work.row_sums[2 * (row + i)], level = work.row_sums[2 * (row + i) + 1];
        const float share = __frcp_rn(static_cast<float>(work.norm.columns));
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float dy = widen(loaded.grad.values[k]), n = at.normalized(loaded.sum.values[k]);
            const float dn = __fmul_rn(dy, gain.values[k]), shift = __fmul_rn(n, along);
            const float mean = __fmul_rn(work.norm.mean ? __fadd_rn(shift, level) : shift, share);
            ds.values[k] = narrow<T>(__fmul_rn(__fsub_rn(dn, mean), at.rstd));
            if (work.grad_sum) {
                ds.values[k] = narrow<T>(__fadd_rn(widen(ds.values[k]), widen(loaded.grad_sum.values[k])));
            }
            weight_sums.values[k] = __fadd_rn(weight_sums.values[k], __fmul_rn(dy, n));
            bias_sums.values[k] = __fadd_rn(bias_sums.values[k], dy);
        }
        store_eight(static_cast<T*>(work.grad_x) + first + i * work.norm.columns, ds);
        return ds;
    }
};

}  // namespace te_graph::fp8
