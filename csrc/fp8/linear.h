// What the FP8 products of one linear layer use beside its parameters, and its differentiable call.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "common/host_steps.h"
#include "fp8/cast_done.h"
#include "fp8/data_writes.h"
#include "fp8/parameter_grad.h"
#include "fp8/scale_table.h"

namespace te_graph::fp8 {

// One tensor's column of a table. No table: current scaling.
struct ScaleColumn {
    ScaleColumn(std::shared_ptr<ScaleTable> table, int64_t number);

    std::shared_ptr<ScaleTable> table;
    int64_t number;
    std::optional<at::Tensor> scale, amax;  // [1] each, views of the table's
};

class Linear : public std::enable_shared_from_this<Linear> {
public:
    // weight: [O, I] FP8; weight_t: [I, O] FP8; weight_scale_inv: [1] fp32; they are cast by others, and stay where
    // they are. inputs_first: the weight that is cast is [I, O]. input, grad: of the casts. grad_dtype: of the cast of
    // gradients. columns: kept until no backward and no graph is left that uses the columns.
    Linear(at::Tensor weight, at::Tensor weight_t, at::Tensor weight_scale_inv, bool inputs_first, ScaleColumn input,
           ScaleColumn grad, at::ScalarType grad_dtype, std::shared_ptr<void> columns);

    // The scale of the cast of an input that is about to follow, a copy, [1], for casts that repeat it; nothing under
    // current scaling.
    std::optional<at::Tensor> begin_input_cast();

    // x: [..., I]; weight: [O, I] or [I, O], of which `weight_` or `weight_t_` is the cast, and which gets the gradient;
    // bias: [O] -> [..., O] of `dtype`. records_amax: that of x, for delayed scaling. scale: that of
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

    // Casts all weights that have changed, with this one among them; records their amaxes if that is wanted.
    using CastWeights = std::function<void(bool records_amax)>;
    void set_cast_weights(CastWeights cast_weights) { cast_weights_ = std::move(cast_weights); }

    void cast_weights(bool records_amax) const { cast_weights_(records_amax); }

    // From now on gradients of the weight are added to its main_grad.
    void set_main_grad_of(ParameterGrad::MainGradOf main_grad_of) { main_grad_of_ = std::move(main_grad_of); }

    // Whether weight [O, I] or [I, O] is as it was when it was cast, and its amax was recorded if that is wanted.
    bool is_cast(const at::Tensor& weight, bool records_amax) const;
    // weight [O, I] or [I, O] has been cast, after `writes` writes (write_count(), before the cast was launched);
    // `done` for other streams.
    void note_cast(const at::Tensor& weight, bool records_amax, WriteCount writes,
                   std::shared_ptr<const CastDone> done);
    // The current stream waits for that cast.
    void wait_for_cast() const;
    // How many there were.
    int64_t casts() const {
        const std::lock_guard lock(mutex_);
        return casts_;
    }

private:
    friend class LinearBackward;
    // Tells the table of a cast that follows, whose amax is recorded; before each replay where it is captured, in
    // the forward of `steps` or in its backward.
    static void begin_cast(const ScaleColumn& column, HostSteps* steps, bool is_forward);

    // The sizes of the weight that is cast.
    at::IntArrayRef weight_sizes() const { return inputs_first_ ? weight_t_.sizes() : weight_.sizes(); }

    const at::Tensor weight_, weight_t_, weight_scale_inv_;  // [O, I], [I, O], [1]
    const bool inputs_first_;
    const ScaleColumn input_, grad_;
    const at::ScalarType grad_dtype_;
    const std::shared_ptr<void> columns_;
    CastWeights cast_weights_;
    ParameterGrad::MainGradOf main_grad_of_;
    int64_t fast_region_ = 0;
    // Of what follows, of the weight at its last cast: replays look at it without the GIL. The storage is held weakly,
    // so that no other one takes its place in memory.
    mutable std::mutex mutex_;
    c10::weak_intrusive_ptr<c10::StorageImpl> cast_storage_;
    const void* cast_address_ = nullptr;
    WriteCount cast_writes_;
    bool has_recorded_amax_ = false;
    std::shared_ptr<const CastDone> cast_done_;
    int64_t casts_ = 0;
};

}  // namespace te_graph::fp8
