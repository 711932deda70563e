// Arguments of an op that lie in the same memory.
//
// Blocks of one launch run in any order. Where an argument that is written shares memory with another, some blocks
// would find what was there before and some what comes after.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>

namespace te_graph {

// An argument by its name; without a tensor where an optional one was left out.
struct Argument {
    // tensor: [...], or undefined.
    Argument(const char* name, const at::Tensor& tensor, bool is_written)
        : name(name), tensor(tensor.defined() ? &tensor : nullptr), is_written(is_written) {}
    // tensor: [...], or none.
    Argument(const char* name, const std::optional<at::Tensor>& tensor, bool is_written)
        : name(name), tensor(tensor && tensor->defined() ? &*tensor : nullptr), is_written(is_written) {}

    const char* name;
    const at::Tensor* tensor;
    bool is_written;
};

// The bytes from the first element of a tensor to its last one; none where it has no elements.
struct Span {
    const char *begin, *end;

    bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
    size_t size() const { return static_cast<size_t>(end - begin); }
};
// tensor: [...].
Span span_of(const at::Tensor& tensor);

// Whether elements of a strided tensor may lie in one place. Sure of views made by slicing: each dimension steps over
// all that the smaller ones span. tensor: [...].
bool may_overlap(const at::Tensor& tensor);

// Raises if elements of a strided tensor [...] that is written may lie in one place. i: of a list `argument`, which
// element.
void check_elements_apart(const char* op, const char* argument, const at::Tensor& tensor,
                          std::optional<size_t> i = std::nullopt);

// Whether two strided tensors have an element in common: not so the columns of one table. a, b: [...].
bool share_memory(const at::Tensor& a, const at::Tensor& b);

// Raises if one is not strided, and if one that is written shares memory with another or is not to be written here.
void check_apart(const char* op, c10::ArrayRef<Argument> arguments);

}  // namespace te_graph
