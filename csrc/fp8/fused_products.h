// FP8 products in a row, with what lies between them made where it is cast: one differentiable call.
//
//   x -> producer -> product -> producer -> product -> ... -> y
//
// The first producer is the cast alone or a norm, others are norms and activations. The norm, of which there is at most
// one, adds a residual first, and its sum is a result, too:  s = input + residual,  y = norm(s).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "fp8/linear_products.h"

namespace te_graph::fp8 {

struct FusedNorm {
    at::Tensor weight;               // [I]
    std::optional<at::Tensor> bias;  // [I]
    double eps;
    bool rms_norm, zero_centered;
};
// Of the op's names; gated: of the first half, times the second one.
struct FusedActivation {
    std::string name;
    bool gated;
};
struct CastAlone {};
using Producer = std::variant<CastAlone, FusedNorm, FusedActivation>;

struct FusedStage {
    Producer producer;
    std::shared_ptr<LinearProducts> products;
    at::Tensor weight;                // [O, I]
    std::optional<at::Tensor> bias;   // [O]
    std::optional<at::Tensor> scale;  // [1], of LinearProducts::begin_input_cast(), now or earlier
};

// x: [..., I]; residual: [..., H], of the norm's input, or none -> y [..., O], of `dtype`, and s [..., H], of the dtype
// of the norm's input, or undefined. records_amax: for delayed scaling.
std::pair<at::Tensor, at::Tensor> fused_products(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                                                 const std::vector<FusedStage>& stages, at::ScalarType dtype,
                                                 bool records_amax);

}  // namespace te_graph::fp8
