#include "fp8/fused_backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "common/own_op.h"
#include "fp8/operand.h"

namespace te_graph::fp8 {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

enum Saved { kSum, kWeight, kMean, kRstd };  // of a norm
constexpr size_t kInput = 0;                 // of an activation

}  // namespace

// What a stage's product gets for its backward: the cast of the gradient of its result, [M, O], [O, padded(M)], [1],
// and its column sums [O].
struct FusedBackward::CastGrad {
    at::Tensor data, transposed, scale_inv, sums;
};

// What one backward works with: of a stage whose product is asked for anything.
struct FusedBackward::StageRun {
    ProductBackward::Run product;
    bool needs_input = false, needs_weight = false, needs_bias = false;
    std::vector<at::Tensor> saved;  // of the producer
};

void FusedBackward::release_variables() {
    const std::lock_guard lock(mutex_);
    for (Stage& stage : stages_) {
        stage.product.release();
        for (SavedVariable& saved : stage.saved) saved.reset_data();
    }
    is_released_ = true;
}

bool FusedBackward::needs_input(size_t i) const {
    const Stage& stage = stages_[i];
    if (stage.norm && (task_should_compute_output(kResidual) || task_should_compute_output(stage.first_edge) ||
                       task_should_compute_output(stage.first_edge + 1))) {
        return true;
    }
    return i == 0 ? task_should_compute_output(kX) : is_asked(i - 1);
}

bool FusedBackward::is_asked(size_t i) const {
    return task_should_compute_output(stages_[i].weight_edge()) || task_should_compute_output(stages_[i].bias_edge()) ||
           needs_input(i);
}

FusedBackward::StageRun FusedBackward::begin(size_t i) {
    Stage& stage = stages_[i];
    StageRun run{.product = stage.product.begin(),
                 .needs_input = needs_input(i),
                 .needs_weight = task_should_compute_output(stage.weight_edge()),
                 .needs_bias = task_should_compute_output(stage.bias_edge()),
                 .saved = {}};
    for (const SavedVariable& saved : stage.saved) {
        run.saved.push_back(run.needs_input ? saved.unpack(getptr()) : at::Tensor());
    }
    return run;
}

// grad: [...].
void FusedBackward::find_memory(size_t i, StageRun& run, const at::Tensor& grad) const {
    if (at::GradMode::is_enabled() || is_looked_at(*this)) return;
    const Stage& stage = stages_[i];
    stage.product.find_memory(run.product, grad, run.needs_weight ? &next_edge(stage.weight_edge()) : nullptr,
                              run.needs_bias ? &next_edge(stage.bias_edge()) : nullptr);
}

// grad: [M, O], of the result of the last product; results: [...] each -> [M, I], of its input.
at::Tensor FusedBackward::last_product(StageRun& run, const at::Tensor& grad, variable_list& results) {
    Stage& stage = stages_.back();
    find_memory(stages_.size() - 1, run, grad);
    auto [below, grad_weight, grad_bias] = stage.product.multiply(run.product, grad, stage.input_dtype,
                                                                  {run.needs_input, run.needs_weight, run.needs_bias});
    std::tie(results[stage.weight_edge()], results[stage.bias_edge()]) =
        stage.product.end(run.product, std::move(grad_weight), std::move(grad_bias));
    return below;
}

// results: [...] each -> [M, I], of its input.
at::Tensor FusedBackward::product(size_t i, StageRun& run, const CastGrad& grad, variable_list& results) {
    static const auto gemm =
        own_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, at::ScalarType,
                          const MaybeTensor&, bool)>("te_graph::fp8_gemm");
    static const auto gemm_out =
        own_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                    const MaybeTensor&, bool, bool)>("te_graph::fp8_gemm_out");
    Stage& stage = stages_[i];
    const LinearProducts& products = stage.product.products();
    at::Tensor below, grad_weight;
    if (run.needs_input) {
        below = gemm.call(grad.data, *run.product.weight_t, grad.scale_inv, products.weight_scale_inv(),
                          stage.input_dtype, std::nullopt, false);
    }
    if (run.needs_weight) {
        if (const MaybeTensor memory = run.product.weight_memory()) {
            gemm_out.call(*memory, grad.transposed, *run.product.x_t, grad.scale_inv, *run.product.x_scale_inv,
                          std::nullopt, false, run.product.accumulates_weight());
        } else {
            grad_weight = gemm.call(grad.transposed, *run.product.x_t, grad.scale_inv, *run.product.x_scale_inv,
                                    run.product.weight_dtype, std::nullopt, false);
        }
    }
    std::tie(results[stage.weight_edge()], results[stage.bias_edge()]) =
        stage.product.end(run.product, std::move(grad_weight), grad.sums);
    return below;
}

// below: [M, I], of the result of the activation of stage i -> what the product before gets.
FusedBackward::CastGrad FusedBackward::activation(size_t i, const StageRun& run, StageRun& before,
                                                  const at::Tensor& below) {
    static const auto op = own_op<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, const at::Tensor&, c10::string_view, at::ScalarType, bool, const MaybeTensor&,
        const MaybeTensor&, bool, bool, const MaybeTensor&, bool)>("te_graph::fp8_activation_backward_cast_transpose");
    const ProductBackward& product = stages_[i - 1].product;
    find_memory(i - 1, before, below);
    const auto [data, transposed, scale_inv, sums] =
        op.call(below, run.saved[kInput], stages_[i].activation->name, product.grad_dtype(),
                stages_[i].activation->gated, product.column().scale, product.column().amax, before.needs_weight,
                before.needs_bias, before.product.bias_memory(), before.product.accumulates_bias());
    return {data, transposed, scale_inv, before.needs_bias && !before.product.bias ? sums : at::Tensor()};
}

// below: [M, I], of the result of the norm of stage i; grad_sum: [M, I], of s, or none; before: of the product
// before, or null; results: [...] each -> what that gets.
FusedBackward::CastGrad FusedBackward::norm(size_t i, const StageRun& run, StageRun* before, const at::Tensor& below,
                                            const MaybeTensor& grad_sum, variable_list& results) {
    static const auto op =
        own_op<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
            const at::Tensor&, const MaybeTensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&,
            const at::Tensor&, bool, std::optional<at::ScalarType>, const MaybeTensor&, const MaybeTensor&, bool,
            std::array<bool, 3>, const MaybeTensor&, bool, const MaybeTensor&, bool, const MaybeTensor&, bool)>(
            "te_graph::fp8_layer_norm_backward");
    const Stage& stage = stages_[i];
    const size_t edges[] = {stage.first_edge, stage.first_edge + 1};
    const at::Tensor& weight = run.saved[kWeight];
    std::optional<ParameterGrad> memory[2];
    bool is_asked_for[2];
    const bool may_add = !at::GradMode::is_enabled() && !is_looked_at(*this);
    for (int which = 0; which < 2; ++which) {
        is_asked_for[which] = task_should_compute_output(edges[which]);
        if (!is_asked_for[which] || !may_add) continue;
        memory[which] = ParameterGrad::find(next_edge(edges[which]), weight.sizes(), weight.scalar_type(), kAnywhere,
                                            below, stage.product.steps(), {});
    }
    const auto place_of = [&](int which) { return ProductBackward::Run::memory_of(memory[which]); };
    const auto accumulates = [&](int which) { return memory[which] && memory[which]->accumulate; };
    if (before != nullptr) find_memory(i - 1, *before, below);
    const ProductBackward* const product = before != nullptr ? &stages_[i - 1].product : nullptr;
    auto [grad_x, data, transposed, scale_inv, grad_weight, grad_bias, sums] = op.call(
        below, grad_sum, as_matrix(run.saved[kSum]), weight, if_defined(run.saved[kMean]), run.saved[kRstd],
        stage.norm->zero_centered, product ? std::optional(product->grad_dtype()) : std::nullopt,
        product ? product->column().scale : std::nullopt, product ? product->column().amax : std::nullopt,
        before != nullptr && before->needs_weight,
        {is_asked_for[0], is_asked_for[1], before != nullptr && before->needs_bias}, place_of(0), accumulates(0),
        place_of(1), accumulates(1), before != nullptr ? before->product.bias_memory() : std::nullopt,
        before != nullptr && before->product.accumulates_bias());
    const at::Tensor of_parameters[] = {grad_weight, grad_bias};
    for (int which = 0; which < 2; ++which) {
        if (!is_asked_for[which]) continue;
        results[edges[which]] = memory[which] ? memory[which]->finish() : of_parameters[which];
    }
    // One tensor where x and the residual have one gradient: of two views AccumulateGrad would make two .grad that have
    // one memory.
    const at::Tensor of_sum = has_residual_ ? grad_x.view(residual_sizes_) : grad_x;
    if (has_residual_) results[kResidual] = of_sum;
    if (i == 0) results[kX] = of_sum;
    return {data, transposed, scale_inv,
            before != nullptr && before->needs_bias && !before->product.bias ? sums : at::Tensor()};
}

variable_list FusedBackward::apply(variable_list&& gradients) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
    variable_list results;
    results.resize(num_outputs());
    const MaybeTensor grad_sum =
        gradients.size() > 1 && gradients[1].defined() ? MaybeTensor(as_matrix(gradients[1])) : std::nullopt;
    if (!gradients[0].defined() && !grad_sum) return results;
    at::Tensor grad = gradients[0].defined() ? gradients[0] : input_metadata(0).zeros_like();
    // As in LinearBackward: gradients of gradients raise.
    if (at::GradMode::is_enabled() && !grad.requires_grad()) grad = grad.detach().requires_grad_();
    std::vector<StageRun> runs(stages_.size());
    size_t first = stages_.size() - 1;
    for (size_t i = stages_.size(); i-- > 0 && (i + 1 == stages_.size() || is_asked(i)); first = i) runs[i] = begin(i);
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!at::GradMode::is_enabled()) below_autograd.emplace();

    at::Tensor below = last_product(runs.back(), as_matrix(grad), results);
    for (size_t i = stages_.size() - 1; i > first; --i) {
        const CastGrad cast = stages_[i].norm ? norm(i, runs[i], &runs[i - 1], below, grad_sum, results)
                                              : activation(i, runs[i], runs[i - 1], below);
        below = product(i - 1, runs[i - 1], cast, results);
    }
    if (below.defined() && stages_[first].norm) norm(first, runs[first], nullptr, below, grad_sum, results);
    if (below.defined() && first == 0 && !stages_[0].norm) results[kX] = below;
    at::Tensor& of_x = results[kX];
    if (of_x.defined() && of_x.sizes() != at::IntArrayRef(x_sizes_)) of_x = of_x.view(x_sizes_);
    return results;
}

}  // namespace te_graph::fp8
