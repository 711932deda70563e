#include "fp8/weight_steps.h"

namespace te_graph::fp8 {

// weight: [O, I] or [I, O].
WeightStep::WeightStep(std::shared_ptr<LinearProducts> products, const at::Tensor& weight, bool records_amax)
    : products_(std::move(products)),
      weight_((weight.is_view() ? weight._base() : weight).getIntrusivePtr()),
      records_amax_(records_amax) {}

void WeightStep::prepare() {
    products_->note_thread();
    const auto weight = at::Tensor(weight_.lock());
    if (!weight.defined()) return;
    if (!products_->is_cast(weight, records_amax_)) products_->cast_weights(records_amax_);
    products_->wait_for_cast();
}

const void* WeightStep::identity() const { return products_->weight_step_identity(records_amax_); }

// weight: [O, I] or [I, O].
CapturedCastStep::CapturedCastStep(std::shared_ptr<LinearProducts> products, const at::Tensor& weight)
    : products_(std::move(products)), weight_(weight.getIntrusivePtr()) {}

// weight: [O, I] or [I, O].
bool CapturedCastStep::is_of(const at::Tensor& weight, bool records_amax) const {
    return (records_amax_ || !records_amax) && mark_.is_of(weight);
}

// weight: [O, I] or [I, O].
void CapturedCastStep::note(const at::Tensor& weight, bool records_amax) {
    weight_ = decltype(weight_)(weight.getIntrusivePtr());
    mark_ = WeightMark(weight);
    records_amax_ = records_amax;
}

void CapturedCastStep::end_capture() {
    const auto weight = at::Tensor(weight_.lock());
    is_cast_at_end_ = weight.defined() && mark_.is_of(weight);
}

void CapturedCastStep::finish() {
    const auto weight = at::Tensor(weight_.lock());
    const bool is_cast = is_cast_at_end_ && weight.defined();
    // Otherwise the copies are of what is gone by now, and of no weight that is called next.
    products_->note_cast(is_cast ? WeightMark(weight) : WeightMark(),
                         is_cast && (records_amax_ || products_->weight_column_.table == nullptr),
                         std::make_shared<CastDone>(products_->weight().device()));
}

const void* CapturedCastStep::identity() const { return products_->captured_cast_step_identity(); }

}  // namespace te_graph::fp8
