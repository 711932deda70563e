#include "fp8/linear_products.h"

#include <ATen/FuncTorchTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include "common/check.h"
#include "common/no_derivative.h"
#include "common/node_pointer.h"
#include "common/own_op.h"
#include "fp8/linear_backward.h"
#include "fp8/region.h"
#include "fp8/weight_steps.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kLinear = "te_graph.Linear";
constexpr int kNotInBackward = -1;

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

}  // namespace

LinearProducts::LinearProducts(at::Tensor weight, at::Tensor weight_t, at::Tensor weight_scale_inv, bool inputs_first,
                               ScaleColumn input_column, ScaleColumn weight_column, ScaleColumn grad_column,
                               at::ScalarType grad_dtype, std::shared_ptr<void> columns)
    : weight_(std::move(weight)),
      weight_t_(std::move(weight_t)),
      weight_scale_inv_(std::move(weight_scale_inv)),
      inputs_first_(inputs_first),
      input_column_(std::move(input_column)),
      weight_column_(std::move(weight_column)),
      grad_column_(std::move(grad_column)),
      grad_dtype_(grad_dtype),
      columns_(std::move(columns)) {}

std::optional<at::Tensor> LinearProducts::begin_input_cast(bool records_amax) {
    if (records_amax) input_column_.begin_cast(HostSteps::current().get(), Direction::kForward);
    return input_column_.scale ? std::optional(input_column_.scale->clone()) : std::nullopt;
}

const CapturedCastStep* LinearProducts::captured_cast() const {
    const std::shared_ptr<HostSteps> steps = HostSteps::current();
    if (steps == nullptr) return nullptr;
    return captured_casts(*steps);
}

bool LinearProducts::is_cast(const at::Tensor& weight, bool records_amax) const {
    if (const std::shared_ptr<HostSteps> steps = HostSteps::current()) {
        if (const auto* const captured = captured_casts(*steps)) return captured->is_of(weight, records_amax);
        records_amax = false;
    }
    const std::lock_guard lock(mutex_);
    return (has_recorded_amax_ || (!records_amax && cast_updated_casts_ == updated_casts())) &&
           cast_mark_.is_of(weight);
}

bool LinearProducts::holds(const at::Tensor& weight) const {
    if (const auto* const captured = captured_cast()) return captured->is_of(weight, false);
    const std::lock_guard lock(mutex_);
    return cast_mark_.is_of(weight);
}

CapturedCastStep* LinearProducts::captured_casts(const HostSteps& steps) const {
    HostStep* const in_backward = steps.find(Direction::kBackward, captured_cast_step_identity());
    HostStep* const in_forward = steps.find(Direction::kForward, captured_cast_step_identity());
    return static_cast<CapturedCastStep*>(in_backward != nullptr ? in_backward : in_forward);
}

LeftCast LinearProducts::left_cast() const {
    const std::lock_guard lock(mutex_);
    return {cast_number_, has_recorded_amax_ ? std::optional(cast_mark_) : std::nullopt};
}

bool LinearProducts::has_recorded_amax(const at::Tensor& weight) const {
    const std::lock_guard lock(mutex_);
    return has_recorded_amax_ && cast_mark_.is_of(weight);
}

bool LinearProducts::is_noted() const {
    const std::shared_ptr<HostSteps> steps = HostSteps::current();
    const auto has = [&](bool records_amax) {
        return steps->find(Direction::kForward, weight_step_identity(records_amax)) != nullptr;
    };
    return steps != nullptr && (has(true) || has(false));
}

void LinearProducts::note_cast(WeightMark mark, bool is_recorded, std::shared_ptr<const CastDone> done,
                               std::optional<int64_t> repeated, std::optional<int64_t> updated_casts) {
    const std::lock_guard lock(mutex_);
    cast_mark_ = std::move(mark);
    has_recorded_amax_ = is_recorded;
    cast_done_ = std::move(done);
    cast_number_ = repeated ? *repeated : ++casts_;
    cast_updated_casts_ = updated_casts ? *updated_casts : this->updated_casts();
    if (is_recorded && weight_column_.table != nullptr) recorded_ = {cast_mark_, cast_number_};
}

LinearProducts::Recorded LinearProducts::recorded() const {
    const std::lock_guard lock(mutex_);
    return recorded_;
}

void LinearProducts::set_recorded(Recorded recorded) {
    if (weight_column_.table == nullptr) return;
    const std::lock_guard lock(mutex_);
    recorded_ = std::move(recorded);
}

int64_t LinearProducts::cast_number() const {
    const std::lock_guard lock(mutex_);
    return cast_number_;
}

int64_t LinearProducts::updated_casts() const {
    return weight_column_.table == nullptr ? 0 : weight_column_.table->updated_casts(weight_column_.column);
}

void LinearProducts::begin_captured_cast(bool records_amax) const {
    if (weight_column_.table == nullptr) return;
    HostSteps& steps = *HostSteps::current();
    if (!records_amax) {
        CapturedColumns::in(steps, Direction::kForward, weight_column_.table).note_read(weight_column_.column);
        return;
    }
    // Eagerly the weight may be cast with others that have changed, when the first of them is called, before the write
    // as well as after it.
    TORCH_CHECK(steps.find(Direction::kForward, weight_step_identity(true)) != nullptr, kLinear,
                ": expected a layer whose weight what is captured writes, or replaces by another one "
                "(torch.func.functional_call), to be trained there before that, with the weight that it had, since "
                "delayed scaling keeps the amaxes of all that is cast, got one that is not: write the weight, or "
                "evaluate with others, behind the first call that trains, or outside of the capture, or use "
                "te_graph.Float8CurrentScaling");
    weight_column_.begin_cast(&steps, Direction::kForward);
}

void LinearProducts::note_scales_read_elsewhere() const {
    const std::shared_ptr<HostSteps> steps = HostSteps::current();
    if (steps == nullptr || input_column_.table == nullptr) return;
    CapturedColumns& columns = CapturedColumns::in(*steps, Direction::kForward, input_column_.table);
    for (const ScaleColumn* const column : {&input_column_, &weight_column_}) {
        columns.note_read_elsewhere(column->column);
    }
}

// weight: [O, I] or [I, O].
void LinearProducts::note_captured_cast(const at::Tensor& weight, bool records_amax, bool is_recorded,
                                        std::optional<int64_t> repeated) {
    HostSteps& steps = *HostSteps::current();
    if (records_amax) weight_column_.end_cast(&steps, Direction::kForward);
    steps.add(steps.direction(), std::make_shared<CapturedCastStep>(shared_from_this()));
    captured_casts(steps)->note(weight, is_recorded);
    const std::lock_guard lock(mutex_);
    cast_number_ = repeated ? *repeated : ++casts_;
    if (is_recorded && weight_column_.table != nullptr) recorded_ = {WeightMark(weight), cast_number_};
}

// weight: [O, I] or [I, O]; scale: [1].
void LinearProducts::note_repeated_cast(const at::Tensor& weight, const std::optional<at::Tensor>& scale) {
    HostSteps& steps = *HostSteps::current();
    const bool is_apart = steps.direction() == Direction::kBackward;
    if (!is_apart || steps.find(Direction::kBackward, captured_cast_step_identity()) != nullptr) return;
    const auto left = std::make_shared<LeftCast>();
    if (steps.add(Direction::kBackward, std::make_shared<RepeatedCastStep>(shared_from_this(), weight, scale, left))) {
        steps.add(Direction::kForward, std::make_shared<LeftCastStep>(shared_from_this(), left));
    }
}

// weight: [O, I] or [I, O].
void LinearProducts::add_weight_step(HostSteps& steps, const at::Tensor& weight, bool records_amax) {
    if (steps.direction() == Direction::kBackward) return;  // note_repeated_cast() has seen to it
    const bool is_first_of_training =
        records_amax && steps.find(Direction::kForward, weight_step_identity(true)) == nullptr;
    // Both casts would come before the graph, and the first call would read the second one.
    TORCH_CHECK(!is_first_of_training || weight_column_.table == nullptr ||
                    steps.find(Direction::kForward, weight_step_identity(false)) == nullptr,
                kLinear,
                ": expected a layer that is captured once without gradients and once with them to be called with "
                "them first, since under delayed scaling the weight is cast for each of the two calls, got the other "
                "order: change it, or call the layer without gradients outside of the capture");
    if (steps.find(Direction::kForward, captured_cast_step_identity()) != nullptr) return;  // the graph casts it
    steps.add(Direction::kForward, std::make_shared<WeightStep>(shared_from_this(), weight, records_amax));
    if (records_amax && weight_column_.table != nullptr) {
        CapturedColumns::in(steps, Direction::kForward, weight_column_.table).note_cast_before(weight_column_.column);
    }
}

void LinearProducts::note_thread() {
    if (torch::autograd::get_current_graph_task_id() == kNotInBackward) thread_ = PyThread_get_thread_ident();
}

void LinearProducts::wait_for_cast() const {
    std::shared_ptr<const CastDone> done;
    {
        const std::lock_guard lock(mutex_);
        done = cast_done_;
    }
    if (done != nullptr) done->wait();
}

void LinearProducts::begin_call(const Call& call) {
    note_thread();
    HostSteps* const steps = call.steps.get();
    if (steps != nullptr) add_weight_step(*steps, call.weight, call.records_amax);
    if (call.records_amax && steps != nullptr) {
        steps->add(Direction::kForward, std::make_shared<TrainingStep>(shared_from_this()));
    } else if (call.records_amax) {
        trains_ = true;
    }
    wait_for_cast();
    if (call.records_amax && !call.scale) input_column_.begin_cast(steps, Direction::kForward);
    if (!call.records_amax && steps != nullptr && input_column_.table != nullptr) {
        CapturedColumns& columns = CapturedColumns::in(*steps, Direction::kForward, input_column_.table);
        columns.note_read(input_column_.column);
        columns.note_read(weight_column_.column);
    }
}

void LinearProducts::end_call(const Call& call) const {
    if (call.records_amax) input_column_.end_cast(call.steps.get(), Direction::kForward);
}

at::Tensor LinearProducts::forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                   at::ScalarType dtype, bool records_amax, const std::optional<at::Tensor>& scale) {
    if (is_forward_mode()) {
        check_no_tangent(kLinear, "x", x);
        check_no_tangent(kLinear, "weight", weight);
        if (bias) check_no_tangent(kLinear, "bias", *bias);
    }
    const Call call{weight, records_amax, scale, HostSteps::current()};
    begin_call(call);
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
    auto [y, x_t, x_scale_inv] = op.call(x, weight_, weight_scale_inv_, bias, input_scale(call), input_amax(call),
                                         dtype, is_followed && needs_weight);
    end_call(call);
    if (!is_followed) return std::move(y);
    ProductBackward product(shared_from_this(), call.steps, weight.scalar_type());
    product.save(needs_x ? weight_t_ : at::Tensor(), needs_weight ? x_t : at::Tensor(),
                 needs_weight ? x_scale_inv : at::Tensor());
    const auto [node, owner] = make_node<LinearBackward>(std::move(product), x.scalar_type());
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias.value_or(at::Tensor())));
    below.reset();
    torch::autograd::set_history(y, owner);
    return std::move(y);
}

// x: [..., I]; weight: [O, I] or [I, O]; bias: [O] -> [..., O].
std::optional<at::Tensor> LinearProducts::fast_call(const at::Tensor& x, const at::Tensor& weight,
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
