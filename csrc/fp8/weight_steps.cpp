#include "fp8/weight_steps.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kFreed = "the memory of a weight that a te_graph.Linear was called with was freed";

}  // namespace

// weight: [O, I] or [I, O].
WeightStep::WeightStep(std::shared_ptr<LinearProducts> products, const at::Tensor& weight, bool records_amax)
    : products_(std::move(products)), weight_(weight), records_amax_(records_amax) {}

std::string WeightStep::change() const { return weight_.is_gone() ? kFreed : ""; }

void WeightStep::prepare() {
    products_->note_thread();
    const at::Tensor weight = weight_.lock();
    TORCH_CHECK(weight.defined(), kFreed, " meanwhile");
    if (!products_->is_cast(weight, records_amax_)) products_->cast_weights(weight, records_amax_);
    products_->wait_for_cast();
}

const void* WeightStep::identity() const { return products_->weight_step_identity(records_amax_); }

void LeftCastStep::finish() { *left_ = products_->left_cast(); }

// weight: [O, I] or [I, O]; scale: [1].
RepeatedCastStep::RepeatedCastStep(std::shared_ptr<LinearProducts> products, const at::Tensor& weight,
                                   std::optional<at::Tensor> scale, std::shared_ptr<LeftCast> left)
    : products_(std::move(products)), weight_(weight), scale_(std::move(scale)), left_(std::move(left)) {}

void RepeatedCastStep::prepare() {
    const at::Tensor weight = weight_.lock();
    const bool is_last = products_->cast_number() == left_->cast_number;
    TORCH_CHECK(weight.defined() || is_last,
                "te_graph.Linear: expected the casts of a weight that the forward has computed, which is gone, in a "
                "backward that computes the layer again, got those of another weight, with which the layer was called "
                "in between: call it so behind the backward");
    const bool is_cast = !weight.defined() || (products_->holds(weight) && (is_last || !scale_));
    if (!is_cast) {
        products_->cast_again(weight, scale_, left_->recorded);
        left_->cast_number = products_->cast_number();
    }
    products_->wait_for_cast();
}

const void* RepeatedCastStep::identity() const { return products_->weight_step_identity(false); }

bool RepeatedCastStep::repeats(const HostStep& other) const {
    return other.identity() == identity() || other.identity() == products_->captured_cast_step_identity();
}

std::optional<WeightMark> CapturedCastStep::Cast::mark_at_end() const {
    const at::Tensor tensor = held();
    return is_left && tensor.defined() ? std::optional(WeightMark(tensor)) : std::nullopt;
}

// weight: [O, I] or [I, O].
bool CapturedCastStep::is_of(const at::Tensor& weight, bool records_amax) const {
    return (is_last_recorded_ || !records_amax) && last_->mark.is_of(weight);
}

// weight: [O, I] or [I, O].
void CapturedCastStep::note(const at::Tensor& weight, bool is_recorded) {
    last_ = Cast{decltype(Cast::weight)(weight.getIntrusivePtr()), WeightMark(weight)};
    is_last_recorded_ = is_recorded;
    if (is_recorded) recorded_ = last_;
}

void CapturedCastStep::end_capture() {
    for (std::optional<Cast>* const cast : {&last_, &recorded_}) {
        if (!*cast) continue;
        const at::Tensor weight = (*cast)->held();
        (*cast)->is_left = weight.defined() && (*cast)->mark.is_of(weight);
    }
}

// The graph may update the scale behind the cast.
void CapturedCastStep::run() { updated_casts_ = products_->updated_casts(); }

void CapturedCastStep::finish() {
    if (recorded_) products_->set_recorded({recorded_->mark_at_end(), std::nullopt});
    // Without a mark the copies are of what is gone by now, and of no weight that is called next.
    const std::optional<WeightMark> mark = last_->mark_at_end();
    products_->note_cast(mark.value_or(WeightMark()), mark && is_last_recorded_,
                         std::make_shared<CastDone>(products_->weight().device()), std::nullopt, updated_casts_);
}

const void* CapturedCastStep::identity() const { return products_->captured_cast_step_identity(); }

}  // namespace te_graph::fp8
