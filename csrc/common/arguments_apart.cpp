#include "common/arguments_apart.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "common/check.h"

namespace te_graph {
namespace {

// Where elements lie, by bytes from the first one: dims by their strides, the longest first.
class Elements {
public:
    // tensor: [...].
    explicit Elements(const at::Tensor& tensor) : size_(static_cast<int64_t>(tensor.element_size())) {
        for (int64_t d = 0; d < tensor.dim(); ++d) {
            // Along a stride of 0 all elements are one.
            if (tensor.size(d) > 1 && tensor.stride(d) > 0)
                dims_.emplace_back(tensor.stride(d) * size_, tensor.size(d));
        }
        std::sort(dims_.rbegin(), dims_.rend());
    }

    int64_t size() const { return size_; }

    // function(byte that element i begins at) of all, until one returns true; whether one did.
    template <typename Function>
    bool any(const Function& function, size_t dim = 0, int64_t begin = 0) const {
        if (dim == dims_.size()) return function(begin);
        const auto [stride, size] = dims_[dim];
        for (int64_t i = 0; i < size; ++i) {
            if (any(function, dim + 1, begin + i * stride)) return true;
        }
        return false;
    }

    // Whether one has that byte, for strides that step over all that the shorter ones span: those of any view of a
    // tensor whose elements are apart.
    bool has(int64_t byte) const {
        if (byte < 0) return false;
        for (const auto& [stride, size] : dims_) byte -= std::min(byte / stride, size - 1) * stride;
        return byte < size_;
    }

private:
    int64_t size_;
    std::vector<std::pair<int64_t, int64_t>> dims_;
};

}  // namespace

Span span_of(const at::Tensor& tensor) {
    const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
    if (tensor.numel() == 0) return {begin, begin};
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

bool may_overlap(const at::Tensor& tensor) {
    if (tensor.is_non_overlapping_and_dense()) return false;
    std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
    for (int64_t d = 0; d < tensor.dim(); ++d) {
        if (tensor.size(d) > 1) dimensions.emplace_back(tensor.stride(d), tensor.size(d));
    }
    std::sort(dimensions.begin(), dimensions.end());
    int64_t span = 1;
    for (const auto& [stride, size] : dimensions) {
        if (stride < span) return tensor.numel() > 0;
        span += stride * (size - 1);
    }
    return false;
}

void check_elements_apart(const char* op, const char* argument, const at::Tensor& tensor, std::optional<size_t> i) {
    TORCH_CHECK_VALUE(!may_overlap(tensor), op, ": expected ", argument, i ? "[" + std::to_string(*i) + "]" : "",
                      " without overlapping elements, got shape ", tensor.sizes(), " with strides ", tensor.strides());
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
    const Span first = span_of(a), second = span_of(b);
    if (!first.overlaps(second)) return false;
    if (a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense()) return true;
    if (a.numel() > b.numel()) return share_memory(b, a);
    const Elements few(a), many(b);
    const int64_t distance = first.begin - second.begin, step = std::min(few.size(), many.size());
    return few.any([&](int64_t begin) {
        for (int64_t byte = 0; byte < few.size(); byte += step) {
            if (many.has(distance + begin + byte)) return true;
        }
        return false;
    });
}

void check_apart(const char* op, c10::ArrayRef<Argument> arguments) {
    c10::SmallVector<Span, 16> spans;  // there may be hundreds of arguments, and all pairs are looked at
    for (const Argument& one : arguments) {
        spans.push_back(Span{nullptr, nullptr});
        if (one.tensor == nullptr) continue;
        check_strided(op, one.name, *one.tensor);
        if (one.is_written) check_writable(op, one.name, *one.tensor);
        spans.back() = span_of(*one.tensor);
        for (size_t i = 0; i + 1 < spans.size(); ++i) {
            const Argument& other = arguments[i];
            if (!spans[i].overlaps(spans.back()) || !(one.is_written || other.is_written)) continue;
            TORCH_CHECK_VALUE(!share_memory(*other.tensor, *one.tensor), op, ": expected ", other.name, " and ",
                              one.name, " that do not overlap, got two that share memory");
        }
    }
}

}  // namespace te_graph
