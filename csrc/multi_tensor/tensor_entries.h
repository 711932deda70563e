// Lists of tensors as the kernels take them: checked, and as entries of a table. The ops share it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

// Any list of tensors as entries over memory without gaps. Tensors with gaps, and sources laid out otherwise than their
// destinations, are represented by copies; finish() writes back those that were to be written.
class TensorEntries {
public:
    // One list, tensors [...] each; `is_written` if the op changes it.
    TensorEntries(const char* op, at::TensorList tensors, bool is_written);
    // Pairs: sources[i] [...] into destinations[i] [...], of equal shape, or both contiguous with equally many
    // elements.
    TensorEntries(const char* op, at::TensorList destinations, at::TensorList sources, bool sources_are_written);

    TensorTable table() const { return {.entries = entries_.data(), .count = static_cast<int64_t>(entries_.size())}; }
    const std::vector<TableEntry>& entries() const { return entries_; }
    at::Device device() const { return device_; }
    bool has_double() const { return has_double_; }  // among the destinations
    // Whether all entries are the tensors' own memory.
    bool is_direct() const { return copies_.empty(); }

    // What stands for a tensor.
    struct Copy {
        at::Tensor tensor;                 // whose values they are
        std::optional<at::Tensor> target;  // where they are to go afterwards
        const char* list;                  // "tensor" or "source", for messages
        size_t i;                          // its place there
    };
    const std::vector<Copy>& copies() const { return copies_; }

    // After the launch: writes copies back and tells autograd what was written.
    void finish();

private:
    // tensor [...] -> [...], a copy without gaps.
    at::Tensor dense(const at::Tensor& tensor, size_t i, bool is_written);
    // source, destination [...] -> [...], a copy of the source laid out like the destination.
    at::Tensor like(const at::Tensor& source, const at::Tensor& destination, size_t i, bool is_written);

    std::vector<TableEntry> entries_;
    std::vector<Copy> copies_;
    at::TensorList written_[2];
    at::Device device_;
    bool has_double_ = false;
};

}  // namespace te_graph::multi_tensor
