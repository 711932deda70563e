// Activations of an MLP and their derivatives, as torch computes them: of a dtype's elements in fp32, each result
// rounded to the dtype. No Torch here.
//
//   y = f(x)                 dx = dy * f'(x)
//   gated, x = [gate, up] along columns:
//   y = f(gate) * up         d_up = dy * f(gate), d_gate = (dy * up) * f'(gate), each product rounded
//
// f: gelu(x) = x / 2 * (1 + erf(x / sqrt 2)); gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)));
// relu(x) = max(x, 0); silu(x) = x / (1 + exp(-x)).
//
// Kernels have the bits of torch's kernels. Those of the CPU loops may differ where erf, tanh and exp do.
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>

#include "common/host_device.h"

namespace te_graph::fp8 {

enum class Activation : uint8_t { kGelu, kGeluTanh, kRelu, kSilu };
constexpr Activation kActivations[] = {Activation::kGelu, Activation::kGeluTanh, Activation::kRelu, Activation::kSilu};

// As in torch, where gelu_tanh is gelu(approximate="tanh").
constexpr const char* name_of(Activation activation) {
    constexpr const char* kNames[] = {"gelu", "gelu_tanh", "relu", "silu"};
    return kNames[static_cast<int>(activation)];
}

constexpr float kSqrtHalf = 0.70710678118654752440f;
constexpr float kSqrtTwoByPi = 0.79788456080286535588f;
constexpr float kDensity = 0.39894228040143267794f;  // of a normal distribution at 0
constexpr float kCubic = 0.044715f;

TE_GRAPH_HOST_DEVICE inline float activated(Activation activation, float x) {
    switch (activation) {
        case Activation::kGelu:
            return x * 0.5f * (1.0f + erff(x * kSqrtHalf));
        case Activation::kGeluTanh: {
            const float inner = kSqrtTwoByPi * (x + kCubic * (x * x * x));
            return 0.5f * x * (1.0f + tanhf(inner));
        }
        case Activation::kRelu:
            return x > 0.0f || x != x ? x : 0.0f;
        case Activation::kSilu:
            return x / (1.0f + expf(-x));
    }
    return 0.0f;
}

// dy * f'(x).
TE_GRAPH_HOST_DEVICE inline float activation_backward(Activation activation, float dy, float x) {
    switch (activation) {
        case Activation::kGelu: {
            const float cdf = 0.5f * (1.0f + erff(x * kSqrtHalf));
            const float pdf = expf(-0.5f * x * x) * kDensity;
            return dy * (cdf + x * pdf);
        }
        case Activation::kGeluTanh: {
            const float square = x * x;
            const float inner = kSqrtTwoByPi * (x + kCubic * (square * x));
            const float tanh_inner = tanhf(inner);
            const float left = 0.5f * x, right = 1.0f + tanh_inner;
            const float inner_derivative = kSqrtTwoByPi * (1.0f + 3.0f * kCubic * square);
            const float right_derivative = left * (1.0f - tanh_inner * tanh_inner) * inner_derivative;
            return dy * (0.5f * right + right_derivative);
        }
        case Activation::kRelu:
            return x <= 0.0f ? 0.0f : dy;
        case Activation::kSilu: {
            const float sigmoid = 1.0f / (1.0f + expf(-x));
            return dy * sigmoid * (1.0f + x * (1.0f - sigmoid));
        }
    }
    return 0.0f;
}

}  // namespace te_graph::fp8
