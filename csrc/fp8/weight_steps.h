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

// How a forward has left the copies that its backward, a graph of its own, reads.
struct LeftCast {
    int64_t cast_number = 0;
    std::optional<WeightMark> recorded;  // the mark of the weight, if its amax was recorded
};

// Of such a forward.
class LeftCastStep final : public HostStep {
public:
    LeftCastStep(std::shared_ptr<LinearProducts> products, std::shared_ptr<LeftCast> left)
        : products_(std::move(products)), left_(std::move(left)) {}
    void finish() override;
    const void* identity() const override { return &products_->has_recorded_amax_; }

private:
    const std::shared_ptr<LinearProducts> products_;
    const std::shared_ptr<LeftCast> left_;
};

// Before a replay of such a backward: casts the weight as the forward did, where other casts have come since.
class RepeatedCastStep final : public HostStep {
public:
    // weight: [O, I] or [I, O]; scale: [1], of the forward's cast, written by each replay of it, or nothing under
    // current scaling.
    RepeatedCastStep(std::shared_ptr<LinearProducts> products, const at::Tensor& weight,
                     std::optional<at::Tensor> scale, std::shared_ptr<LeftCast> left);

    void prepare() override;
    const void* identity() const override;
    // Behind casts in a graph, too.
    bool repeats(const HostStep& other) const override;

private:
    const std::shared_ptr<LinearProducts> products_;
    const WeightReference weight_;
    const std::optional<at::Tensor> scale_;  // [1]
    const std::shared_ptr<LeftCast> left_;
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
