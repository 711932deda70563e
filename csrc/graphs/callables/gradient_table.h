// The device table that a captured backward ends with, and the host's copy of what it holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "multi_tensor/accumulate.h"

namespace te_graph::graphs {

class GradientTable {
public:
    // Whether gradients of dtype `source` can be accumulated into `destination`.
    static bool takes(at::ScalarType source, at::ScalarType destination);

    // One entry per parameter: `sizes[i]` elements, added as `source_dtypes[i]` into `destination_dtypes[i]`; one of
    // no elements is always skipped.
    // Allocates the table on `device`, all entries in mode skip; must not be called during a capture.
    GradientTable(const std::vector<int64_t>& sizes, const std::vector<at::ScalarType>& source_dtypes,
                  const std::vector<at::ScalarType>& destination_dtypes, at::Device device);

    size_t size() const { return current_.size(); }
    const at::Tensor& entries() const { return entries_; }  // [parameters, 4] int64, read by the captured launch
    const at::Tensor& chunks() const { return chunks_; }    // [chunks, 2] int32

    // Writes the addresses of the captured gradients, once known. Synchronous; called once after capture.
    // sources: one dense tensor per entry, of that entry's size and dtype; anything for entries of no elements.
    void bind(const std::vector<at::Tensor>& sources);

    // What is to be done with one gradient.
    struct EntryWrite {
        multi_tensor::Mode mode;
        void* destination;
    };

    // True when the device's table does all that `write_of(index)` asks for: then nothing has to be set or sent.
    template <typename WriteOf>
    bool matches(const WriteOf& write_of) const {
        if (!changed_.empty()) return false;
        for (size_t i = 0; i < current_.size(); ++i) {
            if (differs(i, write_of(i))) return false;
        }
        return true;
    }

    // What the next replay shall do with entry `index`. Nothing is sent until upload().
    void set(size_t index, EntryWrite write);
    // Sends entries that differ from what the device has, on the current stream.
    void upload();

    // Number of upload() calls that had something to send.
    int64_t uploads() const { return uploads_; }

private:
    // A skipped entry's destination is never read, so it may stay as it is.
    bool differs(size_t index, EntryWrite write) const {
        const multi_tensor::TableEntry& entry = current_[index];
        return entry.mode != write.mode ||
               (write.mode != multi_tensor::Mode::kSkip && entry.destination != write.destination);
    }

    at::Tensor entries_;
    at::Tensor chunks_;
    std::vector<multi_tensor::TableEntry> current_;  // what the device holds once changed_ has been sent
    std::vector<size_t> changed_;                    // entries that differ from the device's, each once
    std::vector<bool> is_changed_;
    int64_t uploads_ = 0;
};

// `grad` as one run of elements in memory, ordered as those of `main_grad` if that is defined and dense, else as
// autograd orders the elements of `.grad`: `grad` itself, or a copy.
at::Tensor lay_out(const at::Tensor& grad, const at::Tensor& parameter, const at::Tensor& main_grad);

// True when the elements of `tensor` fill one run of memory, each once, and are what they say (no conjugate views).
bool is_dense(const at::Tensor& tensor);

// A supported dtype with the number of its elements that make one element of `dtype` (2 for complex).
struct ElementType {
    DType dtype;
    int64_t count;
};
ElementType element_type(at::ScalarType dtype);

}  // namespace te_graph::graphs
