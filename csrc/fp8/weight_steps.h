// What replays of a graph with a linear layer do about the cast of its weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "common/host_steps.h"
#include "fp8/linear_products.h"
#include "fp8/weight_mark.h"

namespace te_graph::fp8 {

// Before a replay that reads the cast of a weight.
class WeightStep final : public HostStep {
public:
    // weight: [O, I] or [I, O], or a view of it, which is gone by then.
    WeightStep(std::shared_ptr<LinearProducts> products, const at::Tensor& weight, bool records_amax);

    void prepare() override;
    const void* identity() const override;

private:
    const std::shared_ptr<LinearProducts> products_;
    // A module that is gone does not call its graph any more.
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight_;
    const bool records_amax_;
};

// Of a graph that trains a layer.
class TrainingStep final : public HostStep {
public:
    explicit TrainingStep(std::shared_ptr<LinearProducts> products) : products_(std::move(products)) {}
    void run() override { products_->set_trains(true); }
    const void* identity() const override { return products_.get(); }

private:
    const std::shared_ptr<LinearProducts> products_;
};

// Of casts of a weight inside a graph that writes it, or that calls the layer with another one.
class CapturedCastStep final : public HostStep {
public:
    // weight: [O, I] or [I, O].
    CapturedCastStep(std::shared_ptr<LinearProducts> products, const at::Tensor& weight);

    // Whether weight [O, I] or [I, O] is as it was when it was cast last, and its amax was recorded if that is wanted.
    bool is_of(const at::Tensor& weight, bool records_amax) const;
    // weight [O, I] or [I, O] is cast.
    void note(const at::Tensor& weight, bool records_amax);

    void end_capture() override;
    void finish() override;
    const void* identity() const override;

private:
    const std::shared_ptr<LinearProducts> products_;
    // Of the last cast: a layer may be called with several weights.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight_;
    WeightMark mark_;
    bool records_amax_ = false;
    bool is_cast_at_end_ = false;  // the weight is left as it was cast
};

}  // namespace te_graph::fp8
