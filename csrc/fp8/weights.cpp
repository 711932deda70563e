#include "fp8/weights.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <initializer_list>

#include "common/no_derivative.h"
#include "common/own_op.h"
#include "common/to_device.h"
#include "fp8/arguments.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kWeights = "Fp8Weights";
constexpr int64_t kCastWords = sizeof(Cast) / sizeof(int64_t);

std::string at_index(const char* list, size_t i) { return std::string(list) + "[" + std::to_string(i) + "]"; }

// tensor: [shape].
void check_form(const char* op, const std::string& name, const at::Tensor& tensor, at::IntArrayRef shape,
                at::ScalarType dtype, at::Device device) {
    check_dtype(op, name.c_str(), tensor, dtype);
    check_buffer(op, name.c_str(), tensor, shape, device);
}

void check_count(const char* op, const char* argument, size_t expected, size_t got) {
    TORCH_CHECK_VALUE(got == expected, op, ": expected ", argument, " of ", expected, " tensors, got ", got);
}

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

// lists: [...] each.
MemoryRanges ranges_of(std::initializer_list<at::TensorList> lists) {
    std::vector<const void*> begins;
    std::vector<size_t> sizes;
    for (const at::TensorList list : lists) {
        for (const at::Tensor& tensor : list) {
            begins.push_back(tensor.const_data_ptr());
            sizes.push_back(tensor.nbytes());
        }
    }
    return {begins, sizes};
}

// Raises if one of these shares memory with a buffer of a list of casts, or is written where weights are read.
void check_beside(const char* op, const MemoryRanges& buffers, const MemoryRanges& weights,
                  std::initializer_list<Argument> arguments) {
    for (const Argument& argument : arguments) {
        if (argument.tensor == nullptr) continue;
        const Span span = span_of(*argument.tensor);
        TORCH_CHECK_VALUE(!buffers.find(span.begin, span.size()), op, ": expected out and ", argument.name,
                          " that do not overlap, got two that share memory");
        TORCH_CHECK_VALUE(!argument.is_written || !weights.find(span.begin, span.size()), op, ": expected weights and ",
                          argument.name, " that do not overlap, got two that share memory");
    }
}

// Raises if a launch would write what it reads, or write a place twice. out, weights: [M_i, N_i]; out_t:
// [N_i, M_i] each. vectors: of all weights, and a flag.
void check_lists_apart(const char* op, at::TensorList out, at::TensorList out_t, at::TensorList weights,
                       std::initializer_list<Argument> vectors) {
    for (const at::Tensor& tensor : out) check_writable(op, "out", tensor);
    for (const at::Tensor& tensor : out_t) check_writable(op, "out_t", tensor);
    check_apart(op, vectors);
    const MemoryRanges buffers = ranges_of({out, out_t}), read = ranges_of({weights});
    TORCH_CHECK_VALUE(!buffers.overlap(), op,
                      ": expected out and out_t that do not overlap, got two that share memory");
    TORCH_CHECK_VALUE(!buffers.shared_with(read), op,
                      ": expected out and weights that do not overlap, got two that share memory");
    check_beside(op, buffers, read, vectors);
}

}  // namespace

void check_not_empty(const char* op, at::TensorList weights) {
    TORCH_CHECK_VALUE(!weights.empty(), op, ": expected at least one weight, got an empty list");
}

std::vector<Cast> casts_of(const char* op, at::TensorList out, at::TensorList out_t, at::TensorList weights,
                           const at::Tensor& scale, const at::Tensor& scale_inv, const at::Tensor& amax,
                           const at::Tensor& counts, const at::Tensor& noop) {
    check_not_empty(op, weights);
    check_count(op, "out", weights.size(), out.size());
    if (!out_t.empty()) check_count(op, "out_t", weights.size(), out_t.size());
    const auto n = static_cast<int64_t>(weights.size());
    const at::Device device = weights[0].device();
    const std::initializer_list<Argument> vectors = {{"scale", scale, false},
                                                     {"scale_inv", scale_inv, true},
                                                     {"amax", amax, true},
                                                     {"counts", counts, true},
                                                     {"noop", noop, false}};
    for (const Argument& vector : vectors) {
        if (vector.tensor == nullptr) continue;
        check_device(op, vector.name, *vector.tensor, device);
        check_has_memory(op, vector.name, *vector.tensor);
    }
    const auto scales = strided_of<const float>(op, "scale", scale, n, at::kFloat, device);
    const auto scale_invs = strided_of<float>(op, "scale_inv", scale_inv, n, at::kFloat, device);
    const auto amaxes = strided_of<float>(op, "amax", amax, n, at::kFloat, device);
    if (counts.defined()) check_form(op, "counts", counts, {n, kCounts}, at::kLong, device);
    std::vector<Cast> casts;
    for (size_t i = 0; i < weights.size(); ++i) {
        const at::Tensor& weight = weights[i];
        const std::string name = at_index("weights", i);
        check_device(op, name.c_str(), weight, device);
        check_has_memory(op, name, weight);
        TORCH_CHECK_VALUE(weight.dim() == 2, op, ": expected ", name, " of two dimensions, got shape ", weight.sizes());
        const DType dtype = wide_dtype_of(op, name.c_str(), weight.scalar_type());
        check_contiguous(op, name.c_str(), weight);
        const Format format = format_of(op, at_index("out", i).c_str(), out[i].scalar_type());
        check_form(op, at_index("out", i), out[i], weight.sizes(), out[i].scalar_type(), device);
        if (!out_t.empty()) {
            check_form(op, at_index("out_t", i), out_t[i], {weight.size(1), weight.size(0)}, out[i].scalar_type(),
                       device);
        }
        const auto row = static_cast<int64_t>(i);
        casts.push_back(
            {.input = weight.const_data_ptr(),
             .out = static_cast<uint8_t*>(out[i].data_ptr()),
             .out_t = out_t.empty() ? nullptr : static_cast<uint8_t*>(out_t[i].data_ptr()),
             .scale = &scales[row],
             .scale_inv = &scale_invs[row],
             .amax = &amaxes[row],
             .counts = counts.defined() ? static_cast<int64_t*>(counts.data_ptr()) + row * kCounts : nullptr,
             .rows = weight.size(0),
             .columns = weight.size(1),
             .dtype = dtype,
             .format = format,
             .pads_out_t = false,
             .reserved = {}});
    }
    check_lists_apart(op, out, out_t, weights, vectors);
    return casts;
}

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
