// Elements of activations and of their derivatives, made where they are cast.
#pragma once

#include <type_traits>

#include "fp8/activation_cast.h"
#include "fp8/cast_tile.cuh"

namespace te_graph::fp8 {

template <Activation kActivation, typename T>
__device__ T activated(T x) {
    return narrow<T>(activated(kActivation, widen(x)));
}
template <Activation kActivation, typename T>
__device__ T activation_backward(T dy, T x) {
    return narrow<T>(activation_backward(kActivation, widen(dy), widen(x)));
}
template <typename T>
__device__ T product(T a, T b) {
    return narrow<T>(__fmul_rn(widen(a), widen(b)));
}

// Calls function.operator()<kActivation>(): once for an eight, whose elements are then worked on side by side. A branch
// for each element would have each one wait for the last.
template <typename Function>
__device__ void with_activation(Activation activation, const Function& function) {
    switch (activation) {
        case Activation::kGelu:
            return function.template operator()<Activation::kGelu>();
        case Activation::kGeluTanh:
            return function.template operator()<Activation::kGeluTanh>();
        case Activation::kRelu:
            return function.template operator()<Activation::kRelu>();
        case Activation::kSilu:
            return function.template operator()<Activation::kSilu>();
    }
}

struct Nothing {};

// Eights of y, from `position` on.
template <typename T, bool kGated>
struct ActivationSource {
    static constexpr int kLoads = kGated ? 2 : 1;
    static constexpr Extra kExtra = Extra::kNone;
    struct Loaded {
        Vector<T, 8> gate;
        std::conditional_t<kGated, Vector<T, 8>, Nothing> up;
    };

    const T* gate;
    int64_t columns;
    Activation activation;
    __device__ ActivationSource(const ActivationArguments& work, const Position& position)
        : gate(static_cast<const T*>(work.x) + position.row * (kGated ? 2 : 1) * work.columns + position.column),
          columns(work.columns),
          activation(work.activation) {}

    template <bool kAligned>
    __device__ Loaded load(int i, int64_t end) const {
        Loaded loaded;
        const T* const first = gate + i * (kGated ? 2 : 1) * columns;
        loaded.gate = load_eight<kAligned>(first, end);
        if constexpr (kGated) loaded.up = load_eight<kAligned>(first + columns, end);
        return loaded;
    }
    __device__ void prepare() {}
    __device__ Vector<T, 8> make(int, const Loaded& loaded, bool) const {
        Vector<T, 8> y;
        with_activation(activation, [&]<Activation kActivation>() {
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                y.values[k] = activated<kActivation>(loaded.gate.values[k]);
                if constexpr (kGated) y.values[k] = product(y.values[k], loaded.up.values[k]);
            }
        });
        return y;
    }
};

// Eights of the gradient of x, from `position` on.
template <typename T, bool kGated>
struct ActivationBackwardSource {
    static constexpr int kLoads = kGated ? 3 : 2;
    static constexpr Extra kExtra = Extra::kSums;
    struct Loaded {
        Vector<T, 8> dy, gate;
        std::conditional_t<kGated, Vector<T, 8>, Nothing> up;
    };

    bool is_of_up;  // else of the gate
    const T *dy, *gate;
    int64_t columns;
    Activation activation;
    __device__ ActivationBackwardSource(const ActivationArguments& work, const Position& position)
        : is_of_up(kGated && position.column >= work.columns), columns(work.columns), activation(work.activation) {
        const int64_t beside = position.column - (is_of_up ? columns : 0);
        dy = static_cast<const T*>(work.grad) + position.row * columns + beside;
        gate = static_cast<const T*>(work.x) + position.row * (kGated ? 2 : 1) * columns + beside;
    }

    template <bool kAligned>
    __device__ Loaded load(int i, int64_t end) const {
        Loaded loaded;
        const T* const first = gate + i * (kGated ? 2 : 1) * columns;
        loaded.dy = load_eight<kAligned>(dy + i * columns, end);
        loaded.gate = load_eight<kAligned>(first, end);
        if constexpr (kGated) loaded.up = load_eight<kAligned>(first + columns, is_of_up ? 0 : end);
        return loaded;
    }
    __device__ void prepare() {}
    __device__ Vector<T, 8> make(int, const Loaded& loaded, bool) const {
        Vector<T, 8> dx;
        with_activation(activation, [&]<Activation kActivation>() {
            if (is_of_up) {
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    dx.values[k] = product(loaded.dy.values[k], activated<kActivation>(loaded.gate.values[k]));
                }
                return;
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                T dy = loaded.dy.values[k];
                if constexpr (kGated) dy = product(dy, loaded.up.values[k]);
                dx.values[k] = activation_backward<kActivation>(dy, loaded.gate.values[k]);
            }
        });
        return dx;
    }
};

}  // namespace te_graph::fp8
