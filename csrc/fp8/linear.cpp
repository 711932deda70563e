#include "fp8/linear.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>

#include "common/check.h"
#include "common/no_derivative.h"
#include "common/node_pointer.h"
#include "common/own_op.h"
#include "fp8/gemm.h"
#include "fp8/region.h"

namespace te_graph::fp8 {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

constexpr const char* kLinear = "te_graph.Linear";
constexpr int kNotInBackward = -1;
constexpr size_t kNoAlignment = 1;

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// tensor: [...] or undefined.
MaybeTensor maybe(const at::Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : std::nullopt; }

// Where a gradient [...] goes by itself.
MaybeTensor memory_of(const std::optional<ParameterGrad>& grad) {
    return grad ? MaybeTensor(grad->memory) : std::nullopt;
}

}  // namespace

// Before a replay that reads the cast of a weight.
class WeightStep final : public HostStep {
public:
    // weight: [O, I] or [I, O], or a view of it, which is gone by then.
    WeightStep(std::shared_ptr<Linear> linear, const at::Tensor& weight, bool records_amax)
        : linear_(std::move(linear)),
          weight_((weight.is_view() ? weight._base() : weight).getIntrusivePtr()),
          records_amax_(records_amax) {}
    void prepare() override {
        const auto weight = at::Tensor(weight_.lock());
        if (!weight.defined()) return;
        if (!linear_->is_cast(weight, records_amax_)) linear_->cast_weights(records_amax_);
        linear_->wait_for_cast();
    }
    const void* identity() const override { return linear_->weight_step(records_amax_); }

private:
    const std::shared_ptr<Linear> linear_;
    // A module that is gone does not call its graph any more.
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight_;
    const bool records_amax_;
};

// Of casts of a weight inside a graph that writes it.
class CapturedCastStep final : public HostStep {
public:
    // weight: [O, I] or [I, O].
    CapturedCastStep(std::shared_ptr<Linear> linear, const at::Tensor& weight)
        : linear_(std::move(linear)), weight_(weight.getIntrusivePtr()) {}

    // weight: [O, I] or [I, O].
    bool is_of(const at::Tensor& weight, bool records_amax) const {
        return (records_amax_ || !records_amax) && mark_.is_of(weight);
    }
    // weight: [O, I] or [I, O].
    void note(const at::Tensor& weight, bool records_amax) {
        mark_ = WeightMark(weight);
        records_amax_ = records_amax;
    }
    void end_capture() override {
        const auto weight = at::Tensor(weight_.lock());
        is_cast_at_end_ = weight.defined() && mark_.is_of(weight);
    }
    void finish() override {
        const auto weight = at::Tensor(weight_.lock());
        if (!is_cast_at_end_ || !weight.defined()) return;
        linear_->note_cast(WeightMark(weight), records_amax_ || linear_->weight_column_.table == nullptr,
                           std::make_shared<CastDone>(weight.device()));
    }
    const void* identity() const override { return linear_->captured_cast_step(); }

private:
    const std::shared_ptr<Linear> linear_;
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight_;
    WeightMark mark_;
    bool is_cast_at_end_ = false;  // the weight is left as it was cast last
    bool records_amax_ = false;    // of the last cast
};

class LinearBackward final : public torch::autograd::Node {
public:
    LinearBackward(std::shared_ptr<Linear> linear, std::shared_ptr<HostSteps> steps, at::ScalarType x_dtype,
                   at::ScalarType weight_dtype)
        : linear_(std::move(linear)), steps_(std::move(steps)), x_dtype_(x_dtype), weight_dtype_(weight_dtype) {}

    // weight_t: [I, O], for the gradient of x; x_t [I, padded(M)] and x_scale_inv [1], for that of the weight.
    void save(const at::Tensor& weight_t, const at::Tensor& x_t, const at::Tensor& x_scale_inv) {
        saved_ = {SavedVariable(weight_t, false), SavedVariable(x_t, false), SavedVariable(x_scale_inv, false)};
    }

    // gradients: [..., O] -> [..., I], [O, I] or [I, O], [O].
    variable_list apply(variable_list&& gradients) override;

    void release_variables() override {
        const std::lock_guard lock(mutex_);
        for (SavedVariable& saved : saved_) saved.reset_data();
        is_released_ = true;
    }
    std::string name() const override { return "te_graph::LinearBackward"; }

private:
    const std::shared_ptr<Linear> linear_;
    const std::shared_ptr<HostSteps> steps_;
    const at::ScalarType x_dtype_, weight_dtype_;
    // [I, O] or undefined: weight_t, as it was in the forward.
    at::Tensor unpack_weight_t();

    const int64_t casts_ = linear_->casts();
    std::array<SavedVariable, 3> saved_;
    bool is_released_ = false;
};

at::Tensor LinearBackward::unpack_weight_t() {
    constexpr const char* kOtherCast =
        "te_graph.Linear: the weight was cast again between this forward and its backward (it changed, or another "
        "recipe or the optimizer came in between), and there is one cast of a weight: run the backward before";
    at::Tensor weight_t;
    try {
        weight_t = saved_[0].unpack();
    } catch (const c10::Error& error) {
        TORCH_CHECK(false, kOtherCast, " (", error.what_without_backtrace(), ")");
    }
    // A hook may have kept a copy, which has no version that shows that the scale is that of another cast.
    const bool is_copy = weight_t.defined() && !weight_t.is_alias_of(linear_->weight_t_);
    TORCH_CHECK(!is_copy || linear_->casts() == casts_, kOtherCast);
    return weight_t;
}

variable_list LinearBackward::apply(variable_list&& gradients) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
    if (!gradients[0].defined()) return variable_list(3);
    // Gradients of gradients also pass through x and the weight, whose casts have none: results say so when one is
    // asked of them, whether or not they are recorded for the sake of the gradient.
    const bool must_be_followed = at::GradMode::is_enabled() && !gradients[0].requires_grad();
    const at::Tensor grad = must_be_followed ? gradients[0].detach().requires_grad_() : gradients[0];
    const std::array<bool, 3> mask{task_should_compute_output(0), task_should_compute_output(1),
                                   task_should_compute_output(2)};
    linear_->grad_column_.begin_cast(steps_.get(), Direction::kBackward);
    static const auto op =
        own_op<Three(const at::Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                     const MaybeTensor&, const MaybeTensor&, at::ScalarType, at::ScalarType, at::ScalarType,
                     std::array<bool, 3>, const MaybeTensor&, bool, const MaybeTensor&, bool, bool)>(
            "te_graph::fp8_linear_backward");
    // What hooks of saved tensors run, as a checkpoint's recomputation, is no part of the call.
    const MaybeTensor weight_t = maybe(unpack_weight_t()), x_t = maybe(saved_[1].unpack()),
                      x_scale_inv = maybe(saved_[2].unpack());
    // Where nothing is followed, autograd's part, some of the call's time on the host, is left out.
    const bool is_followed = at::GradMode::is_enabled();
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!is_followed) below.emplace();
    std::optional<ParameterGrad> of_weight, of_bias;
    // What looks at the results of the node is to find them.
    const bool is_looked_at = !post_hooks().empty() || (torch::autograd::AnomalyMode::is_enabled() &&
                                                        torch::autograd::AnomalyMode::should_check_nan());
    const bool may_add = !is_followed && !is_looked_at;
    if (mask[1] && may_add) {
        of_weight = ParameterGrad::find(next_edge(1), linear_->weight_sizes(), weight_dtype_, kGemmAlignment, grad,
                                        steps_.get(), linear_->main_grad_of_);
    }
    if (mask[2] && may_add) {
        of_bias = ParameterGrad::find(next_edge(2), {grad.size(-1)}, grad.scalar_type(), kNoAlignment, grad,
                                      steps_.get(), {});
    }
    auto [grad_x, grad_weight, grad_bias] =
        op.call(grad, weight_t, linear_->weight_scale_inv_, x_t, x_scale_inv, linear_->grad_column_.scale,
                linear_->grad_column_.amax, linear_->grad_dtype_, x_dtype_,
                of_weight ? of_weight->memory.scalar_type() : weight_dtype_, mask, memory_of(of_weight),
                of_weight && of_weight->accumulates, memory_of(of_bias), of_bias && of_bias->accumulates,
                linear_->inputs_first_);
    linear_->grad_column_.end_cast(steps_.get(), Direction::kBackward);
    if (of_weight) grad_weight = of_weight->finish();
    if (of_bias) grad_bias = of_bias->finish();
    return {std::move(grad_x), std::move(grad_weight), std::move(grad_bias)};
}

Linear::Linear(at::Tensor weight, at::Tensor weight_t, at::Tensor weight_scale_inv, bool inputs_first,
               ScaleColumn input_column, ScaleColumn weight_column, ScaleColumn grad_column, at::ScalarType grad_dtype,
               std::shared_ptr<void> columns)
    : weight_(std::move(weight)),
      weight_t_(std::move(weight_t)),
      weight_scale_inv_(std::move(weight_scale_inv)),
      inputs_first_(inputs_first),
      input_column_(std::move(input_column)),
      weight_column_(std::move(weight_column)),
      grad_column_(std::move(grad_column)),
      grad_dtype_(grad_dtype),
      columns_(std::move(columns)) {}

std::optional<at::Tensor> Linear::begin_input_cast() {
    input_column_.begin_cast(HostSteps::current().get(), Direction::kForward);
    return input_column_.scale ? std::optional(input_column_.scale->clone()) : std::nullopt;
}

bool Linear::is_cast(const at::Tensor& weight, bool records_amax) const {
    if (const auto steps = HostSteps::current()) {
        const auto* const captured =
            static_cast<CapturedCastStep*>(steps->find(Direction::kForward, captured_cast_step()));
        if (captured != nullptr) return captured->is_of(weight, records_amax);
        records_amax = false;
    }
    const std::lock_guard lock(mutex_);
    return (has_recorded_amax_ || !records_amax) && cast_mark_.is_of(weight);
}

void Linear::note_cast(WeightMark mark, bool records_amax, std::shared_ptr<const CastDone> done) {
    const std::lock_guard lock(mutex_);
    cast_mark_ = std::move(mark);
    has_recorded_amax_ = records_amax;
    cast_done_ = std::move(done);
    ++casts_;
}

void Linear::begin_captured_cast(bool records_amax) const {
    if (weight_column_.table == nullptr) return;
    HostSteps& steps = *HostSteps::current();
    if (!records_amax) {
        CapturedColumns::in(steps, Direction::kForward, weight_column_.table).update_if_left();
        return;
    }
    // Eagerly the weight may be cast with others that have changed, when the first of them is called, before the write
    // as well as after it.
    TORCH_CHECK(steps.find(Direction::kForward, weight_step(true)) != nullptr, kLinear,
                ": expected a weight that what is captured does not write before it calls the layer, since delayed "
                "scaling keeps the amaxes of all that is cast, got one that it writes: write it outside of the "
                "capture, or use te_graph.Float8CurrentScaling");
    weight_column_.begin_cast(&steps, Direction::kForward);
}

// weight: [O, I] or [I, O].
void Linear::note_captured_cast(const at::Tensor& weight, bool records_amax) {
    HostSteps& steps = *HostSteps::current();
    if (records_amax) weight_column_.end_cast(&steps, Direction::kForward);
    steps.add(Direction::kForward, std::make_shared<CapturedCastStep>(shared_from_this(), weight));
    static_cast<CapturedCastStep*>(steps.find(Direction::kForward, captured_cast_step()))->note(weight, records_amax);
}

// weight: [O, I] or [I, O].
void Linear::add_weight_step(HostSteps& steps, const at::Tensor& weight, bool records_amax) {
    const bool is_first_of_training = records_amax && steps.find(Direction::kForward, weight_step(true)) == nullptr;
    // Both casts would come before the graph, and the first call would read the second one.
    TORCH_CHECK(!is_first_of_training || weight_column_.table == nullptr ||
                    steps.find(Direction::kForward, weight_step(false)) == nullptr,
                kLinear,
                ": expected a layer that is captured once without gradients and once with them to be called with "
                "them first, since under delayed scaling the weight is cast for each of the two calls, got the other "
                "order: change it, or call the layer without gradients outside of the capture");
    if (steps.find(Direction::kForward, captured_cast_step()) != nullptr) return;  // the graph casts it
    steps.add(Direction::kForward, std::make_shared<WeightStep>(shared_from_this(), weight, records_amax));
    if (records_amax && weight_column_.table != nullptr) {
        CapturedColumns::in(steps, Direction::kForward, weight_column_.table).note_cast_before(weight_column_.number);
    }
}

void Linear::wait_for_cast() const {
    std::shared_ptr<const CastDone> done;
    {
        const std::lock_guard lock(mutex_);
        done = cast_done_;
    }
    if (done != nullptr) done->wait();
}

at::Tensor Linear::forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                           at::ScalarType dtype, bool records_amax, const std::optional<at::Tensor>& scale) {
    if (is_forward_mode()) {
        check_no_tangent(kLinear, "x", x);
        check_no_tangent(kLinear, "weight", weight);
        if (bias) check_no_tangent(kLinear, "bias", *bias);
    }
    const std::shared_ptr<HostSteps> steps = HostSteps::current();
    if (steps != nullptr) add_weight_step(*steps, weight, records_amax);
    wait_for_cast();
    if (records_amax && !scale) input_column_.begin_cast(steps.get(), Direction::kForward);
    if (!records_amax && steps != nullptr && input_column_.table != nullptr) {
        CapturedColumns::in(*steps, Direction::kForward, input_column_.table).update_if_left();
    }
    const bool needs_x = x.requires_grad(), needs_weight = weight.requires_grad();
    const bool is_followed = at::GradMode::is_enabled() && (needs_x || needs_weight || (bias && bias->requires_grad()));
    if (is_followed) {
        if (const auto& transforms = at::functorch::functorchTLSAccessor()) {
            transforms->checkSupportsCppAutogradFunction();
        }
    }
    static const auto op =
        own_op<Three(const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&, const MaybeTensor&,
                     const MaybeTensor&, at::ScalarType, bool)>("te_graph::fp8_linear_forward");
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (is_followed) below.emplace();
    auto [y, x_t, x_scale_inv] =
        op.call(x, weight_, weight_scale_inv_, bias, scale ? scale : input_column_.scale,
                records_amax ? input_column_.amax : std::nullopt, dtype, is_followed && needs_weight);
    if (records_amax) input_column_.end_cast(steps.get(), Direction::kForward);
    if (!is_followed) return std::move(y);
    const auto [node, owner] =
        make_node<LinearBackward>(shared_from_this(), steps, x.scalar_type(), weight.scalar_type());
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias.value_or(at::Tensor())));
    node->save(needs_x ? weight_t_ : at::Tensor(), needs_weight ? x_t : at::Tensor(),
               needs_weight ? x_scale_inv : at::Tensor());
    below.reset();
    torch::autograd::set_history(y, owner);
    return std::move(y);
}

// x: [..., I]; weight: [O, I] or [I, O]; bias: [O] -> [..., O].
std::optional<at::Tensor> Linear::fast_call(const at::Tensor& x, const at::Tensor& weight,
                                            const std::optional<at::Tensor>& bias) {
    const bool is_usual = fast_region_ != 0 && fast_region_ == region() && at::GradMode::is_enabled() &&
                          HostSteps::current() == nullptr &&
                          at::SavedTensorDefaultHooks::get_tls_state().stack.empty() &&
                          torch::autograd::get_current_graph_task_id() == kNotInBackward;
    if (!is_usual || x.device() != weight.device() || x.scalar_type() != weight.scalar_type() ||
        weight.device() != weight_.device() || weight.sizes() != weight_sizes() ||
        at::autocast::is_autocast_enabled(x.device().type()) || (bias && !bias->is_contiguous()) ||
        !is_cast(weight, true)) {
        return std::nullopt;
    }
    return forward(x, weight, bias, x.scalar_type(), true, std::nullopt);
}

}  // namespace te_graph::fp8
