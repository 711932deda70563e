#include "fp8/fused_products.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "common/check.h"
#include "common/no_derivative.h"
#include "common/node_pointer.h"
#include "common/own_op.h"
#include "fp8/fused_backward.h"
#include "fp8/operand.h"

namespace te_graph::fp8 {

using torch::autograd::SavedVariable;

namespace {

constexpr const char* kFused = "te_graph (fused FP8 layers)";

using FusedStageBackward = FusedBackward::Stage;

// tensor: [...].
bool requires_grad(const MaybeTensor& tensor) { return tensor && tensor->requires_grad(); }

// All that gradients are for, in the order of FusedBackward's results; undefined where there is none.
std::vector<at::Tensor> differentiable(const at::Tensor& x,          // [..., I]
                                       const MaybeTensor& residual,  // [..., H]
                                       const std::vector<FusedStage>& stages) {
    std::vector<at::Tensor> tensors{x, residual.value_or(at::Tensor())};
    for (const FusedStage& stage : stages) {
        if (const auto* const norm = std::get_if<FusedNorm>(&stage.producer)) {
            tensors.push_back(norm->weight);
            tensors.push_back(norm->bias.value_or(at::Tensor()));
        }
        tensors.push_back(stage.weight);
        tensors.push_back(stage.bias.value_or(at::Tensor()));
    }
    return tensors;
}

// residual: [..., H].
void check_stages(const MaybeTensor& residual, const std::vector<FusedStage>& stages) {
    int norms = 0;
    for (size_t i = 0; i < stages.size(); ++i) {
        const Producer& producer = stages[i].producer;
        norms += std::holds_alternative<FusedNorm>(producer);
        const bool fits =
            i == 0 ? !std::holds_alternative<FusedActivation>(producer) : !std::holds_alternative<CastAlone>(producer);
        TORCH_CHECK(fits, kFused,
                    ": expected a cast alone or a norm, and then norms and activations, got another order");
        TORCH_CHECK(!stages[i].products->inputs_first(), kFused, ": expected weights [out, in], got one [in, out]");
    }
    TORCH_CHECK(!stages.empty() && norms <= 1 && (norms == 1 || !residual), kFused,
                ": expected one norm at most, and one with a residual, got ", norms);
}

// What a producer gives to its product, and keeps for the backward.
struct Produced {
    Operand operand;
    at::Tensor sum;                // the norm's s [M, I]; undefined: its input
    std::vector<at::Tensor> kept;  // the norm's weight [I], mean [M] or undefined, and rstd [M]
};

// input, residual: [M, I]; scale, amax: [1].
Produced produce(const FusedNorm& norm, const at::Tensor& input, const MaybeTensor& residual, at::ScalarType dtype,
                 const MaybeTensor& scale, const MaybeTensor& amax, bool with_transposed) {
    static const auto op = own_op<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const MaybeTensor&, const at::Tensor&, const MaybeTensor&, double, at::ScalarType, bool,
        bool, const MaybeTensor&, const MaybeTensor&, bool)>("te_graph::fp8_layer_norm_cast_transpose");
    const auto [data, transposed, scale_inv, sum, mean, rstd] =
        op.call(input, residual, norm.weight, norm.bias, norm.eps, dtype, norm.rms_norm, norm.zero_centered, scale,
                amax, with_transposed);
    return {{data, transposed, scale_inv},
            residual ? sum : at::Tensor(),
            {norm.weight, norm.rms_norm ? at::Tensor() : mean, rstd}};
}

// input: [M, I], or gated [M, 2 I]; scale, amax: [1].
Produced produce(const FusedActivation& activation, const at::Tensor& input, at::ScalarType dtype,
                 const MaybeTensor& scale, const MaybeTensor& amax, bool with_transposed) {
    static const auto op = own_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, c10::string_view, at::ScalarType, bool, const MaybeTensor&, const MaybeTensor&, bool)>(
        "te_graph::fp8_activation_cast_transpose");
    const auto [data, transposed, scale_inv] =
        op.call(input, activation.name, dtype, activation.gated, scale, amax, with_transposed);
    return {{data, transposed, scale_inv}, {}, {}};
}

// The product of an operand -> [M, O].
at::Tensor product_of(const FusedStage& stage, const Operand& operand, at::ScalarType dtype) {
    static const auto op = own_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                             at::ScalarType, const MaybeTensor&, bool)>("te_graph::fp8_gemm");
    return op.call(operand.data, stage.products->weight(), operand.scale_inv, stage.products->weight_scale_inv(), dtype,
                   stage.bias, true);
}

}  // namespace

// x: [..., I]; residual: [..., H].
std::pair<at::Tensor, at::Tensor> fused_products(const at::Tensor& x, const MaybeTensor& residual,
                                                 const std::vector<FusedStage>& stages, at::ScalarType dtype,
                                                 bool records_amax) {
    check_stages(residual, stages);
    const std::vector<at::Tensor> inputs = differentiable(x, residual, stages);
    bool is_followed = false;
    for (const at::Tensor& input : inputs) {
        if (!input.defined()) continue;
        if (is_forward_mode()) check_no_tangent(kFused, "an argument or a parameter", input);
        is_followed |= input.requires_grad();
    }
    is_followed &= at::GradMode::is_enabled();
    if (is_followed) {
        if (const auto& transforms = at::functorch::functorchTLSAccessor()) {
            transforms->checkSupportsCppAutogradFunction();
        }
    }
    const std::shared_ptr<HostSteps> steps = HostSteps::current();
    static const auto linear = own_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&, const MaybeTensor&,
        const MaybeTensor&, at::ScalarType, bool)>("te_graph::fp8_linear_forward");
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (is_followed) below.emplace();

    std::vector<FusedStageBackward> kept;
    at::Tensor input = as_matrix(x), sum;
    bool needs_input = x.requires_grad(), is_sum_followed = false;
    size_t edge = FusedBackward::kFirstOfStages, stage_of_sum = 0;
    for (const FusedStage& stage : stages) {
        LinearProducts& products = *stage.products;
        const LinearProducts::Call call{stage.weight, records_amax, stage.scale, steps};
        products.begin_call(call);
        const bool needs_weight = is_followed && stage.weight.requires_grad();
        const MaybeTensor scale = products.input_scale(call), amax = products.input_amax(call);
        const at::ScalarType fp8 = products.weight().scalar_type();
        FusedStageBackward backward{.product = {stage.products, steps, stage.weight.scalar_type()},
                                    .norm = {},
                                    .activation = {},
                                    .input_dtype = input.scalar_type(),
                                    .first_edge = edge,
                                    .saved = {}};
        Produced produced;
        at::Tensor result;
        if (const auto* const norm = std::get_if<FusedNorm>(&stage.producer)) {
            const MaybeTensor more = residual ? MaybeTensor(as_matrix(*residual)) : std::nullopt;
            produced = produce(*norm, input, more, fp8, scale, amax, needs_weight);
            is_sum_followed = needs_input || requires_grad(residual);
            needs_input |= requires_grad(residual) || norm->weight.requires_grad() || requires_grad(norm->bias);
            if (residual) {
                sum = produced.sum.view(residual->sizes());
                stage_of_sum = kept.size();
            }
            backward.norm = FusedNorm{{}, {}, norm->eps, norm->rms_norm, norm->zero_centered};
            backward.saved.resize(4);
            if (is_followed && !residual) backward.saved[0] = SavedVariable(kept.empty() ? x : input, false);
            for (size_t i = 0; is_followed && i < produced.kept.size(); ++i) {
                backward.saved[1 + i] = SavedVariable(produced.kept[i], false);
            }
        } else if (const auto* const activation = std::get_if<FusedActivation>(&stage.producer)) {
            produced = produce(*activation, input, fp8, scale, amax, needs_weight);
            backward.activation = *activation;
            if (is_followed && needs_input) backward.saved.emplace_back(input, false);
        } else {
            std::tie(result, produced.operand.transposed, produced.operand.scale_inv) = linear.call(
                input, products.weight(), products.weight_scale_inv(), stage.bias, scale, amax, dtype, needs_weight);
        }
        if (!result.defined()) result = product_of(stage, produced.operand, dtype);
        products.end_call(call);
        if (is_followed) {
            backward.product.save(needs_input ? products.weight_t() : at::Tensor(),
                                  needs_weight ? produced.operand.transposed : at::Tensor(),
                                  needs_weight ? produced.operand.scale_inv : at::Tensor());
            needs_input |= needs_weight || requires_grad(stage.bias);
        }
        edge = backward.bias_edge() + 1;
        kept.push_back(std::move(backward));
        input = std::move(result);
    }
    at::Tensor y = input.view(with_last(x.sizes(), input.size(1)));
    if (!is_followed) return {std::move(y), std::move(sum)};
    const auto [node, owner] = make_node<FusedBackward>(
        std::move(kept), x.sizes().vec(), residual ? std::optional(residual->sizes().vec()) : std::nullopt);
    node->set_next_edges(torch::autograd::collect_next_edges(at::TensorList(inputs)));
    below.reset();
    torch::autograd::set_history(y, owner);
    if (sum.defined() && is_sum_followed) torch::autograd::set_history(sum, owner);
    if (sum.defined()) node->stages()[stage_of_sum].saved[0] = SavedVariable(sum, is_sum_followed);
    return {std::move(y), std::move(sum)};
}

}  // namespace te_graph::fp8
