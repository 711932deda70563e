#include "fp8/weight_table.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "common/no_derivative.h"
#include "common/own_op.h"
#include "common/to_device.h"
#include "fp8/arguments.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kWeights = "Fp8Weights";
constexpr int64_t kCastWords = sizeof(Cast) / sizeof(int64_t);

// Raises for an inference tensor [...]: no version counter shows that it was changed, and outside of that mode none may
// be written.
void check_has_version(const std::string& name, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(!tensor.is_inference(), kWeights, ": expected ", name,
                      " made outside of inference mode, got an inference tensor, whose changes cannot be seen; "
                      "clone() it outside of that mode");
}

// weights: [M_i, N_i] each.
void check_have_versions(at::TensorList weights) {
    for (size_t i = 0; i < weights.size(); ++i) check_has_version(at_index("weights", i), weights[i]);
}

}  // namespace

WeightTable::TensorState::TensorState(const at::Tensor& tensor)
    : data(tensor.const_data_ptr()),
      dtype(tensor.dtype()),
      dim(static_cast<uint8_t>(tensor.dim())),
      is_contiguous(tensor.is_contiguous()) {
    std::copy(tensor.sizes().begin(), tensor.sizes().end(), sizes.begin());
    std::copy(tensor.strides().begin(), tensor.strides().end(), strides.begin());
}

inline const char* WeightTable::TensorState::change_of(const at::Tensor& tensor) const {
    const c10::TensorImpl& now = *tensor.unsafeGetTensorImpl();
    if (tensor.const_data_ptr() != data) return " moved to other memory";
    const at::IntArrayRef now_sizes = now.sizes();
    const bool is_as_before =
        now_sizes.size() == dim && now_sizes[0] == sizes[0] && (dim == 1 || now_sizes[1] == sizes[1]) &&
        now.dtype() == dtype && !now.key_set().has_any(kDeferred) &&
        (is_contiguous ? now.is_contiguous() : now.strides() == at::IntArrayRef(strides.data(), dim));
    return is_as_before ? nullptr : " changed its shape, strides or dtype";
}

WeightTable::WeightTable(Tensors weights, Tensors out, Tensors out_t, at::Tensor scale, at::Tensor scale_inv,
                         at::Tensor amax, at::Tensor counts, std::vector<std::string> names)
    : weights_(std::move(weights)),
      out_(std::move(out)),
      out_t_(std::move(out_t)),
      scale_{scale, {}},
      scale_inv_{scale_inv, {}},
      amax_{amax, {}},
      counts_{counts, {}},
      names_(std::move(names)) {
    std::vector<Cast> casts = casts_of(kWeights, out_, out_t_, weights_, scale, scale_inv, amax, counts, {});
    check_have_versions(weights_);
    check_has_version("amax", amax);
    TORCH_CHECK_VALUE(!amax.requires_grad(), kWeights,
                      ": expected amax, which casts write, without requires_grad, got one with it; pass amax.detach()");
    TORCH_CHECK_VALUE(names_.size() == weights_.size(), kWeights, ": expected ", weights_.size(), " names, got ",
                      names_.size());
    buffers_ = ranges_of({out_, out_t_});
    weight_states_ = states_of(weights_);
    out_states_ = states_of(out_);
    out_t_states_ = states_of(out_t_);
    for (Vector* const vector : {&scale_, &scale_inv_, &amax_, &counts_}) {
        if (vector->tensor.defined()) vector->state.emplace(vector->tensor);
    }
    kind_ = kind_of(casts[0]);
    for (const Cast& cast : casts) {
        if (kind_of(cast) != kind_) kind_ = kMixed;
    }
    std::vector<Tile> tiles;
    for (size_t entry = 0; entry < casts.size(); ++entry) {
        // Empty ones have a tile, too, for their scale_inv.
        const int64_t count = std::max<int64_t>(1, tiles_of(casts[entry]));
        for (int64_t index = 0; index < count; ++index) {
            tiles.push_back({static_cast<int32_t>(entry), static_cast<int32_t>(index)});
        }
    }
    written_ = out_;
    written_.insert(written_.end(), out_t_.begin(), out_t_.end());
    for (const at::Tensor& vector : {scale_inv, amax, counts}) {
        if (vector.defined()) written_.push_back(vector);
    }
    const at::Device device = weights_[0].device();
    table_ = to_device(casts, kCastWords, at::kLong, device);
    tiles_ = to_device(tiles, 2, at::kInt, device);
    state_ = at::zeros({2}, at::TensorOptions().dtype(at::kInt).device(device));
}

std::string WeightTable::moved(const Tensors& tensors, const TensorStates& states, const char* what) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i].const_data_ptr() != states[i].data) return what + names_[i] + " moved to other memory";
    }
    return {};
}

void WeightTable::check_places() const {
    std::string change;
    for (size_t i = 0; change.empty() && i < weights_.size(); ++i) {
        const char* const of_weight = weight_states_[i].change_of(weights_[i]);
        if (of_weight == nullptr) continue;
        change = names_[i] + of_weight + ": call update() with the weights as they are";
    }
    if (change.empty()) change = moved(out_, out_states_, "the FP8 data of ");
    if (change.empty()) change = moved(out_t_, out_t_states_, "the transposed FP8 data of ");
    const auto look_at = [&](const char* name, const Vector& vector) {
        const char* const of_vector = vector.state ? vector.state->change_of(vector.tensor) : nullptr;
        if (change.empty() && of_vector != nullptr) change = std::string(name) + of_vector;
    };
    look_at("scale", scale_);
    look_at("scale_inv", scale_inv_);
    look_at("amax", amax_);
    look_at("counts", counts_);
    TORCH_CHECK(change.empty(), kWeights, ": ", change);
}

void WeightTable::cast(const std::optional<at::Tensor>& noop, bool is_done) {
    check_places();
    if (is_forward_mode()) {
        for (const at::Tensor& weight : weights_) check_no_tangent(kWeights, "weights", weight);
        check_no_tangent(kWeights, "scale", scale_.tensor);
    }
    check_apart(kWeights, {{"scale_inv", scale_inv_.tensor, true},
                           {"amax", amax_.tensor, true},
                           {"counts", counts_.tensor, true},
                           {"noop", noop, false}});
    check_beside(kWeights, buffers_, {}, {{"noop", noop, false}});
    // Before the launch: what another thread writes meanwhile is to be cast again.
    Marks marks;
    if (is_done) marks = Marks(weights_.begin(), weights_.end());
    static const auto op = own_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::TensorList, int64_t,
                                       const std::optional<at::Tensor>&)>("te_graph::fp8_cast_weights_table_");
    op.call(table_, tiles_, state_, written_, kind_, noop);
    if (is_done) marks_ = std::move(marks);
}

std::string WeightTable::stale() const {
    for (size_t i = 0; i < weights_.size(); ++i) {
        if (marks_.empty()) return names_[i] + " was never cast";
        const char* const change = weight_states_[i].change_of(weights_[i]);
        if (change != nullptr) return names_[i] + change;
        if (!marks_[i].is_of(weights_[i])) return names_[i] + " changed since it was cast";
    }
    return {};
}

void WeightTable::update(Tensors weights) {
    check_count(kWeights, "weights", weights_.size(), weights.size());
    check_have_versions(weights);
    std::vector<int64_t> addresses;
    for (size_t i = 0; i < weights.size(); ++i) {
        const std::string name = at_index("weights", i);
        check_form(kWeights, name, weights[i], weights_[i].sizes(), weights_[i].scalar_type(), table_.device());
        check_has_memory(kWeights, name, weights[i]);
        const auto address = reinterpret_cast<int64_t>(weights[i].const_data_ptr());
        // Captured launches are of the kernel for aligned ones.
        TORCH_CHECK_VALUE(!is_uniform(kind_) || address % 16 == 0, kWeights, ": expected ", name,
                          " at a multiple of 16 bytes, as all were before, got storage offset ",
                          weights[i].storage_offset());
        addresses.push_back(address);
    }
    const MemoryRanges read = ranges_of({weights});
    TORCH_CHECK_VALUE(!buffers_.shared_with(read), kWeights,
                      ": expected weights apart from the FP8 buffers, got one that shares memory with them");
    check_beside(
        kWeights, buffers_, read,
        {{"scale_inv", scale_inv_.tensor, true}, {"amax", amax_.tensor, true}, {"counts", counts_.tensor, true}});
    // The first word of a row is the input.
    const auto options = at::TensorOptions().dtype(at::kLong);
    table_.select(1, 0).copy_(at::from_blob(addresses.data(), {static_cast<int64_t>(addresses.size())}, options));
    weights_ = std::move(weights);
    weight_states_ = states_of(weights_);
    marks_.clear();
}

}  // namespace te_graph::fp8
