// All weights of a model prepared once for casting: their table lies on the device, so a call passes a few pointers,
// and a captured call casts whatever weights the table names when it is replayed.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "fp8/cast_list.h"
#include "fp8/weight_mark.h"

namespace te_graph::fp8 {

// Owns what it is given. Memory of the table stays the same for its life.
class WeightTable {
public:
    using Tensors = std::vector<at::Tensor>;

    // As casts_of(): weights, out: [M_i, N_i]; out_t: [N_i, M_i] each; scale, scale_inv, amax: [n]; counts:
    // [n, kCounts].
    WeightTable(Tensors weights, Tensors out, Tensors out_t, at::Tensor scale, at::Tensor scale_inv, at::Tensor amax,
                at::Tensor counts, std::vector<std::string> names);

    // Raises if something moved; casts, through the dispatcher. noop: [] or [1]. is_done: now, not by a replay of what
    // is captured.
    void cast(const std::optional<at::Tensor>& noop, bool is_done);

    // Which weight changed since the last cast(), or moved, in words; empty if none did.
    std::string stale() const;

    // Raises if a weight or a buffer lies elsewhere, or otherwise, than the table says.
    void check_places() const;

    // Other weights, [M_i, N_i] each, of the same shapes and dtypes, stream-ordered.
    void update(Tensors weights);

    // [M_i, N_i] each.
    const Tensors& weights() const { return weights_; }
    // What the casts read beside the weights and scales: the table [n, 10], its tiles [tiles, 2], the state [2].
    Tensors tables() const { return {table_, tiles_, state_}; }

private:
    // The layout that the table was built for: a tensor may be laid out otherwise later, over the same memory.
    struct TensorState {
        // tensor: [M, N] or [n].
        explicit TensorState(const at::Tensor& tensor);
        // What changed about tensor [...] since, in words; nullptr: nothing.
        const char* change_of(const at::Tensor& tensor) const;

        // Small, since all are read at the start of each micro-batch.
        const void* data;
        std::array<int64_t, 2> sizes{}, strides{};  // [dim]
        caffe2::TypeMeta dtype;
        uint8_t dim;  // 1 or 2
        bool is_contiguous;
    };
    using TensorStates = std::vector<TensorState>;
    using Marks = std::vector<WeightMark>;
    // tensors: [M_i, N_i] each.
    static TensorStates states_of(const Tensors& tensors) { return {tensors.begin(), tensors.end()}; }
    // tensors: [M_i, N_i] each. The buffers, which are this object's own, are looked at for their address alone.
    std::string moved(const Tensors& tensors, const TensorStates& states, const char* what) const;

    // With an element for each weight.
    struct Vector {
        at::Tensor tensor;                 // [n], or [n, kCounts]; undefined: none
        std::optional<TensorState> state;  // once the tensor has been checked
    };

    Tensors weights_;
    const Tensors out_, out_t_;
    Vector scale_, scale_inv_, amax_, counts_;
    Tensors written_;  // out, out_t, and the vectors but for scale
    const std::vector<std::string> names_;
    MemoryRanges buffers_;  // of out and out_t
    TensorStates weight_states_, out_states_, out_t_states_;
    Marks marks_;  // of the weights at the last cast; empty: there was none yet
    int kind_;     // of all casts
    at::Tensor table_, tiles_, state_;
};

}  // namespace te_graph::fp8
