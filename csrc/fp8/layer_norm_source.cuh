// Elements of layer norms and of their derivatives, made where they are cast.
#pragma once

#include "fp8/cast_tile.cuh"
#include "fp8/layer_norm.h"

namespace te_graph::fp8 {

// Eight of a vector of parameters, W [columns], from `column` on.
template <typename W>
__device__ Vector<W, 8> eight_of(const void* values, int64_t column) {
    return load_eight<true>(static_cast<const W*>(values) + column, 8);
}
template <typename W>
__device__ Vector<float, 8> widened(const Vector<W, 8>& eight) {
    Vector<float, 8> wide;
#pragma unroll
    for (int k = 0; k < 8; ++k) wide.values[k] = widen(eight.values[k]);
    return wide;
}
// g, of eight of the weight.
template <typename W>
__device__ Vector<float, 8> gain_of(const LayerNorm& work, const Vector<W, 8>& weight) {
    Vector<float, 8> gain = widened(weight);
#pragma unroll
    for (float& value : gain.values) value = work.zero_centered ? __fadd_rn(1.0f, value) : value;
    return gain;
}

// What all elements of a row have in common.
struct Row {
    float mean = 0, rstd = 0;
    Row() = default;
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
    struct Loaded {
        Vector<T, 8> sum;
        Row row;
    };
    static constexpr int kLoads = 2;

    const LayerNorm& work;
    const T* sum;
    Position position;
    Vector<float, 8> gain{}, bias{};
    __device__ LayerNormSource(const LayerNorm& work, const Position& position)
        : work(work),
          sum(static_cast<const T*>(work.sum) + position.row * work.columns + position.column),
          position(position) {}

    template <bool kAligned>
    __device__ Loaded load(int i, int64_t end) const {
        return {load_eight<kAligned>(sum + i * work.columns, end), end > 0 ? Row(work, position.row + i) : Row()};
    }
    __device__ void prepare() {
        if (position.column >= work.columns) return;
        with_dtype(work.weight_dtype, [&]<typename W>() {
            const Vector<W, 8> weight = eight_of<W>(work.weight, position.column);
            // Read together with the weight, if only to be left out.
            const Vector<W, 8> shift = eight_of<W>(work.bias ? work.bias : work.weight, position.column);
            gain = gain_of(work, weight);
            bias = widened(shift);
        });
    }
    __device__ Vector<T, 8> make(int, const Loaded& loaded, bool is_inside) const {
        Vector<T, 8> y{};
        if (!is_inside) return y;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float scaled = __fmul_rn(loaded.row.normalized(loaded.sum.values[k]), gain.values[k]);
            y.values[k] = narrow<T>(work.bias ? __fadd_rn(scaled, bias.values[k]) : scaled);
        }
        return y;
    }
};

// Eights of ds, which are written, too, and what they add to the column sums of dy * n and of dy.
template <typename T, Tiling kTiling>
struct LayerNormBackwardSource {
    struct Loaded {
        Vector<T, 8> sum, grad, grad_sum;
        Row row;
        float2 row_sums;
    };
    static constexpr int kLoads = 3;

    const LayerNormBackward& work;
    int64_t first, row, column;  // of the matrices' elements; of their rows, and columns
    Vector<float, 8> gain{};
    ThreadSums<kTiling> weight_sums, bias_sums;
    __device__ LayerNormBackwardSource(const LayerNormBackward& work, const Position& position)
        : work(work),
          first(position.row * work.norm.columns + position.column),
          row(position.row),
          column(position.column) {}

    template <bool kAligned>
    __device__ Loaded load(int i, int64_t end) const {
        const int64_t at = first + i * work.norm.columns;
        return {load_eight<kAligned>(static_cast<const T*>(work.norm.sum) + at, end),
                load_eight<kAligned>(static_cast<const T*>(work.grad) + at, end),
                load_eight<kAligned>(static_cast<const T*>(work.grad_sum) + at, work.grad_sum ? end : 0),
                end > 0 ? Row(work.norm, row + i) : Row(),
                end > 0 ? reinterpret_cast<const float2*>(work.row_sums)[row + i] : float2{}};
    }
    __device__ void prepare() {
        if (column >= work.norm.columns) return;
        with_dtype(work.norm.weight_dtype,
                   [&]<typename W>() { gain = gain_of(work.norm, eight_of<W>(work.norm.weight, column)); });
    }
    __device__ Vector<T, 8> make(int i, const Loaded& loaded, bool is_inside) {
        Vector<T, 8> ds{};
        if (!is_inside) return ds;
        const auto [along, level] = loaded.row_sums;
        const float share = __frcp_rn(static_cast<float>(work.norm.columns));
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float dy = widen(loaded.grad.values[k]), n = loaded.row.normalized(loaded.sum.values[k]);
            const float dn = __fmul_rn(dy, gain.values[k]), shift = __fmul_rn(n, along);
            const float mean = __fmul_rn(work.norm.mean ? __fadd_rn(shift, level) : shift, share);
            ds.values[k] = narrow<T>(__fmul_rn(__fsub_rn(dn, mean), loaded.row.rstd));
            if (work.grad_sum) {
                ds.values[k] = narrow<T>(__fadd_rn(widen(ds.values[k]), widen(loaded.grad_sum.values[k])));
            }
            weight_sums.add(i, k, __fmul_rn(dy, n));
            bias_sums.add(i, k, dy);
        }
        store_eight(static_cast<T*>(work.grad_x) + first + i * work.norm.columns, ds);
        return ds;
    }
};

}  // namespace te_graph::fp8
