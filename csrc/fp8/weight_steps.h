// What replays of a graph with a linear layer do about the cast of its weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "common/host_steps.h"
#include "fp8/linear_products.h"
#include "fp8/weight_mark.h"
#include "fp8/weight_reference.h"

namespace te_graph::fp8 {

// Before a replay that reads the cast of a weight.
class WeightStep final : public HostStep {
public:
    // weight: [O, I] or [I, O].
    WeightStep(std::shared_ptr<LinearProducts> products, const at::Tensor& weight, bool records_amax);

    std::string change() const override;
    void prepare() override;
    const void* identity() const override;

private:
    const std::shared_ptr<LinearProducts> products_;
    const WeightReference weight_;
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
    explicit CapturedCastStep(std::shared_ptr<LinearProducts> products) : products_(std::move(products)) {}

    // Whether weight [O, I] or [I, O] is as it was when it was cast last, and its amax was recorded if that is wanted.
    bool is_of(const at::Tensor& weight, bool records_amax) const;
    // weight [O, I] or [I, O] is cast; its amax is recorded, now or by the cast that this one repeats.
    void note(const at::Tensor& weight, bool is_recorded);

    void end_capture() override;
    void run() override;
    void finish() override;
    const void* identity() const override;

private:
    // A weight, as it was when it was cast.
    struct Cast {
        c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight;
        WeightMark mark;
        bool is_left = false;  // the graph leaves it so

        // [O, I] or [I, O]; undefined: it is gone.
        at::Tensor held() const { return at::Tensor(weight.lock()); }
        // Of the weight as it is behind a replay; nothing: it has been written since it was cast, or is gone.
        std::optional<WeightMark> mark_at_end() const;
    };

    const std::shared_ptr<LinearProducts> products_;
    // A layer may be called with several weights.
    std::optional<Cast> last_, recorded_;
    bool is_last_recorded_ = false;
    int64_t updated_casts_ = 0;  // before a replay under way
};

}  // namespace te_graph::fp8
