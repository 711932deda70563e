// What the FP8 products of one linear layer use beside its parameters, and its differentiable call.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "common/host_steps.h"
#include "fp8/cast_done.h"
#include "fp8/parameter_grad.h"
#include "fp8/scale_column.h"
#include "fp8/weight_mark.h"

namespace te_graph::fp8 {

class CapturedCastStep;
struct LeftCast;

class LinearProducts : public std::enable_shared_from_this<LinearProducts> {
public:
    // weight: [O, I] FP8; weight_t: [I, O] FP8; weight_scale_inv: [1] fp32; they are cast by others, and stay where
    // they are. inputs_first: the weight that is cast is [I, O]. input_column, weight_column, grad_column: of the
    // casts. grad_dtype: of the cast of gradients. columns: kept until no backward and no graph is left that uses them.
    LinearProducts(at::Tensor weight, at::Tensor weight_t, at::Tensor weight_scale_inv, bool inputs_first,
                   ScaleColumn input_column, ScaleColumn weight_column, ScaleColumn grad_column,
                   at::ScalarType grad_dtype, std::shared_ptr<void> columns);

    // What a call does beside its launches: of weight [O, I] or [I, O]; scale: of the input's cast [1], where it
    // repeats one; steps: of the capture that it is in, or null.
    struct Call {
        const at::Tensor& weight;
        bool records_amax;
        const std::optional<at::Tensor>& scale;
        std::shared_ptr<HostSteps> steps;
    };
    void begin_call(const Call& call);
    void end_call(const Call& call) const;
    // By which the input is cast, and where its amax goes: [1] each.
    std::optional<at::Tensor> input_scale(const Call& call) const {
        return call.scale ? call.scale : input_column_.scale;
    }
    // [1].
    std::optional<at::Tensor> input_amax(const Call& call) const {
        return call.records_amax ? input_column_.amax : std::nullopt;
    }

    // The copies that are multiplied.
    const at::Tensor& weight() const { return weight_; }                      // [O, I]
    const at::Tensor& weight_t() const { return weight_t_; }                  // [I, O]
    const at::Tensor& weight_scale_inv() const { return weight_scale_inv_; }  // [1] fp32
    bool inputs_first() const { return inputs_first_; }

    // The scale of the cast of an input that is about to follow, a copy, [1], for casts that repeat it; nothing under
    // current scaling. records_amax: that of the cast.
    std::optional<at::Tensor> begin_input_cast(bool records_amax);

    // x: [..., I]; weight: [O, I] or [I, O], of which `weight_` or `weight_t_` is the cast, and which gets the
    // gradient; bias: [O] -> [..., O] of `dtype`. records_amax: that of x, for delayed scaling. scale: that of
    // begin_input_cast(), now or earlier.
    at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::ScalarType dtype, bool records_amax, const std::optional<at::Tensor>& scale);

    // A call that needs no Python: forward() of the dtype of x, whose amax is recorded, inside the region for
    // which the layer has its scales here, with a weight that is cast, where gradients are recorded. Nothing is done,
    // and nothing returned, where there is more to look at: a capture, an evaluation, a checkpoint, torch.autocast, an
    // unusual argument. x: [..., I]; weight: [O, I] or [I, O]; bias: [O] -> [..., O].
    std::optional<at::Tensor> fast_call(const at::Tensor& x, const at::Tensor& weight,
                                        const std::optional<at::Tensor>& bias);
    // The number of that region.
    void set_fast_region(int64_t number) { fast_region_ = number; }

    // Casts weight [O, I] or [I, O], and those of others that have changed; records their amaxes if that is wanted.
    using CastWeights = std::function<void(const at::Tensor& weight, bool records_amax)>;
    void set_cast_weights(CastWeights cast_weights) { cast_weights_ = std::move(cast_weights); }
    // weight: [O, I] or [I, O].
    void cast_weights(const at::Tensor& weight, bool records_amax) const { cast_weights_(weight, records_amax); }

    // Casts weight [O, I] or [I, O] once more by scale [1], with which it was cast, or under current scaling by its
    // own. recorded: the mark of the weight by then, if its amax was recorded.
    using CastAgain = std::function<void(const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                                         const std::optional<WeightMark>& recorded)>;
    void set_cast_again(CastAgain cast_again) { cast_again_ = std::move(cast_again); }
    // The same. weight: [O, I] or [I, O]; scale: [1].
    void cast_again(const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                    const std::optional<WeightMark>& recorded) const {
        cast_again_(weight, scale, recorded);
    }
    // A backward that is captured by itself reads the cast of weight [O, I] or [I, O] by scale [1] that its forward has
    // left: see to that before each replay.
    void note_repeated_cast(const at::Tensor& weight, const std::optional<at::Tensor>& scale);

    // From now on gradients of the weight are added to its main_grad.
    void set_main_grad_of(ParameterGrad::MainGradOf main_grad_of) { main_grad_of_ = std::move(main_grad_of); }

    // Whether weight [O, I] or [I, O] is as it was when it was cast, and its amax was recorded if that is wanted; one
    // that was not is cast anew when its scale has changed, since a graph that casts other weights than the layer's own
    // does so by the present scale. In a capture that has itself cast the weight: whether it is as that cast left it.
    // In other captures `records_amax` is ignored: each replay's WeightStep records it.
    bool is_cast(const at::Tensor& weight, bool records_amax) const;
    // Whether the copies are a cast of weight [O, I] or [I, O] as it is, by whatever scale.
    bool holds(const at::Tensor& weight) const;
    // Whether the last cast that is not captured is of weight [O, I] or [I, O] as it is, and its amax was recorded.
    bool has_recorded_amax(const at::Tensor& weight) const;
    // The weight has been cast, as it was when `mark` was made, before the launch; `done` for other streams.
    // is_recorded: its amax was recorded, now or by the cast that this one repeats, whose number is `repeated`.
    // updated_casts: by the scale of then; the present one without.
    void note_cast(WeightMark mark, bool is_recorded, std::shared_ptr<const CastDone> done,
                   std::optional<int64_t> repeated = std::nullopt, std::optional<int64_t> updated_casts = std::nullopt);
    // Before a cast of the weight inside what this thread captures (or warms up), which has written the weight, so that
    // each replay casts it there. With several weights, call this for all of them before the first launch.
    void begin_captured_cast(bool records_amax) const;
    // After it, as note_cast(); records_amax: each replay does. weight: [O, I] or [I, O].
    void note_captured_cast(const at::Tensor& weight, bool records_amax, bool is_recorded,
                            std::optional<int64_t> repeated);
    // Of delayed scaling: the weight whose amax was recorded last, as it was then, and the number of that cast, if it
    // was made here. Other weights may have been cast since.
    struct Recorded {
        std::optional<WeightMark> mark;
        std::optional<int64_t> number;
    };
    Recorded recorded() const;
    void set_recorded(Recorded recorded);
    // Another set of products is about to take the scales of inputs and the weight, in a capture or outside of one.
    void note_scales_read_elsewhere() const;
    // The current stream waits for that cast.
    void wait_for_cast() const;
    // Whether what this thread captures, or warms up, has called the layer.
    bool is_noted() const;
    // Whether a call, or a replay of one, has had gradients recorded since that was set to false.
    bool trains() const { return trains_; }
    void set_trains(bool trains) { trains_ = trains; }
    // The thread that called the layer last, or replayed such a call, by Python's number; 0: none. Not of autograd, on
    // which a checkpoint computes again.
    unsigned long thread() const { return thread_; }
    void set_thread(unsigned long thread) { thread_ = thread; }
    void note_thread();
    // Of the last cast, captured ones and those of replays among them.
    int64_t cast_number() const;
    // Of the tensor, as in ScaleTable; 0 under current scaling.
    int64_t updated_casts() const;

private:
    friend class ProductBackward;
    friend class WeightStep;
    friend class LeftCastStep;
    friend class RepeatedCastStep;
    friend class CapturedCastStep;
    // What replays do before graphs that read the cast of weight [O, I] or [I, O].
    void add_weight_step(HostSteps& steps, const at::Tensor& weight, bool records_amax);
    // By which these steps are known.
    const void* weight_step_identity(bool records_amax) const {
        return records_amax ? static_cast<const void*>(&weight_) : &weight_t_;
    }
    const void* captured_cast_step_identity() const { return &weight_column_; }
    // That of what this thread captures; null: it has cast no weight of the layer.
    const CapturedCastStep* captured_cast() const;
    // The last casts of the weight that `steps` are of; null: there are none.
    CapturedCastStep* captured_casts(const HostSteps& steps) const;
    // How the copies are now.
    LeftCast left_cast() const;

    // The sizes of the weight that is cast.
    at::IntArrayRef weight_sizes() const { return inputs_first_ ? weight_t_.sizes() : weight_.sizes(); }

    const at::Tensor weight_, weight_t_, weight_scale_inv_;  // [O, I], [I, O], [1]
    const bool inputs_first_;
    const ScaleColumn input_column_, weight_column_, grad_column_;
    const at::ScalarType grad_dtype_;
    const std::shared_ptr<void> columns_;
    CastWeights cast_weights_;
    CastAgain cast_again_;
    ParameterGrad::MainGradOf main_grad_of_;
    int64_t fast_region_ = 0;
    std::atomic<bool> trains_ = false;
    std::atomic<unsigned long> thread_ = 0;
    // Of what follows, of the last cast of the weight: replays look at it without the GIL.
    mutable std::mutex mutex_;
    WeightMark cast_mark_;
    bool has_recorded_amax_ = false;
    std::shared_ptr<const CastDone> cast_done_;
    int64_t casts_ = 0, cast_number_ = 0;
    int64_t cast_updated_casts_ = 0;  // by the time that its scale was read
    Recorded recorded_;
};

}  // namespace te_graph::fp8
