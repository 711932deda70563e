#include "fp8/cast_list.h"

#include "fp8/arguments.h"

namespace te_graph::fp8 {
namespace {

// Raises if a launch would write what it reads, or write a place twice. out, weights: [M_i, N_i]; out_t:
// [N_i, M_i] each. vectors: of all weights, and a flag.
void check_lists_apart(const char* op, at::TensorList out, at::TensorList out_t, at::TensorList weights,
                       c10::ArrayRef<Argument> vectors) {
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

// Where the elements lie of vectors [n_j], which have n of them together.
template <typename T>
std::vector<T*> elements_of(const char* op, const char* argument, at::TensorList vectors, int64_t n,
                            at::Device device) {
    std::vector<T*> elements;
    for (const at::Tensor& vector : vectors) {
        const int64_t length = vectors.size() == 1 ? n : vector.numel();
        const auto strided = strided_of<T>(op, argument, vector, length, at::kFloat, device);
        for (int64_t i = 0; i < length; ++i) elements.push_back(&strided[i]);
    }
    TORCH_CHECK_VALUE(static_cast<int64_t>(elements.size()) == n, op, ": expected ", argument, " of ", n,
                      " elements in all, got ", elements.size());
    return elements;
}

}  // namespace

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

void check_beside(const char* op, const MemoryRanges& buffers, const MemoryRanges& weights,
                  c10::ArrayRef<Argument> arguments) {
    for (const Argument& argument : arguments) {
        if (argument.tensor == nullptr) continue;
        const Span span = span_of(*argument.tensor);
        TORCH_CHECK_VALUE(!buffers.find(span.begin, span.size()), op, ": expected out and ", argument.name,
                          " that do not overlap, got two that share memory");
        TORCH_CHECK_VALUE(!argument.is_written || !weights.find(span.begin, span.size()), op, ": expected weights and ",
                          argument.name, " that do not overlap, got two that share memory");
    }
}

void check_not_empty(const char* op, at::TensorList weights) {
    TORCH_CHECK_VALUE(!weights.empty(), op, ": expected at least one weight, got an empty list");
}

std::vector<Cast> casts_of(const char* op, at::TensorList out, at::TensorList out_t, at::TensorList weights,
                           at::TensorList scale, at::TensorList scale_inv, at::TensorList amax,
                           const at::Tensor& counts, const at::Tensor& noop) {
    check_not_empty(op, weights);
    check_count(op, "out", weights.size(), out.size());
    if (!out_t.empty()) check_count(op, "out_t", weights.size(), out_t.size());
    const auto n = static_cast<int64_t>(weights.size());
    const at::Device device = weights[0].device();
    std::vector<Argument> vectors;
    for (const at::Tensor& vector : scale) vectors.emplace_back("scale", vector, false);
    for (const at::Tensor& vector : scale_inv) vectors.emplace_back("scale_inv", vector, true);
    for (const at::Tensor& vector : amax) vectors.emplace_back("amax", vector, true);
    vectors.emplace_back("counts", counts, true);
    vectors.emplace_back("noop", noop, false);
    for (const Argument& vector : vectors) {
        if (vector.tensor == nullptr) continue;
        check_device(op, vector.name, *vector.tensor, device);
        check_has_memory(op, vector.name, *vector.tensor);
    }
    const auto scales = elements_of<const float>(op, "scale", scale, n, device);
    const auto scale_invs = elements_of<float>(op, "scale_inv", scale_inv, n, device);
    const auto amaxes =
        amax.empty() ? std::vector<float*>(weights.size()) : elements_of<float>(op, "amax", amax, n, device);
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
        casts.push_back({.input = weight.const_data_ptr(),
                         .out = static_cast<uint8_t*>(out[i].data_ptr()),
                         .out_t = out_t.empty() ? nullptr : static_cast<uint8_t*>(out_t[i].data_ptr()),
                         .scale = scales[i],
                         .scale_inv = scale_invs[i],
                         .amax = amaxes[i],
                         .counts = counts.defined() ? static_cast<int64_t*>(counts.data_ptr()) + i * kCounts : nullptr,
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

}  // namespace te_graph::fp8
