// A list of tensors prepared once: its table lies on the device, so a call passes a few pointers, a captured call
// works on whatever tensors the table names when it is replayed, and the table can be changed in between.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "multi_tensor/memory_ranges.h"
#include "multi_tensor/operands.h"
#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

inline constexpr const char* kPlan = "MultiTensorPlan";  // in messages

// Does not own the tensors. Memory of the table, the chunks and the partial stays the same for the plan's life.
class Plan {
public:
    using Tensors = std::vector<at::Tensor>;

    // tensors: [...] each, and sources: [...] of equal shapes if there are any: dense, of one device. Copies the table
    // there, synchronously.
    Plan(const Tensors& tensors, const Tensors& sources);

    const at::Tensor& table() const { return table_; }      // [tensors, 4] int64
    const at::Tensor& chunks() const { return chunks_; }    // [chunks, 2] int32
    const at::Tensor& partial() const { return partial_; }  // [kPartialWords] int64, zero between calls
    at::ScalarType norm_dtype() const { return norm_dtype_; }
    bool has_sources() const { return !sources_.empty(); }
    bool may_accumulate() const { return may_accumulate_; }
    size_t size() const { return tensors_.size(); }

    // Raises if a tensor died, moved or changed its size, strides or dtype, or if autograd follows it: one that is
    // written and has a history by now, and any with a tangent. Tells autograd that those which are written are.
    void check(bool writes_tensors, bool writes_sources) const;

    // Before an op that writes the tensors. Raises, too, if one of the operands lies in what is written.
    void check_write(bool writes_sources, const Operands& operands) const;

    // After that op, which may have refused its operands: tells autograd what was written.
    void note_write(bool writes_sources) const;

    // Those tensors, and sources, [...] each, that are asked for and still exist.
    Tensors tensors(bool with_tensors, bool with_sources) const;

    // Other tensors and sources, [...] each, of the same sizes and dtypes. The table is changed on the current stream:
    // launches before it work on the old ones, launches and replays after it on the new ones.
    void update(const Tensors& tensors, const Tensors& sources);

private:
    // What is remembered of one tensor. Weak references keep the objects readable, though not what they own, so a look
    // needs no lock on either: a tensor that another thread drops meanwhile might as well have died a moment later.
    struct TensorReference {
        c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
        c10::weak_intrusive_ptr<c10::StorageImpl> storage;
        const c10::StorageImpl* memory;  // what `storage` refers to
        const void* data;                // where it begins
        int64_t offset, numel;
        uint32_t strides;  // 0: contiguous
        caffe2::TypeMeta dtype;

        bool is_alive() const { return tensor.use_count() > 0; }
        bool is_unmoved() const;
    };
    // The lists as the table has them, and where they lie.
    struct Layout {
        std::vector<TableEntry> entries;
        MemoryRanges written, read;
        // Of tensors or sources one was made in inference mode: then each op that writes looks whether it may.
        bool has_inference;
    };
    void locate(bool writes_tensors, bool writes_sources) const;
    static void check(const std::vector<TensorReference>& references, const char* list);
    static void check_not_inference(const char* list, const std::vector<TensorReference>& references);
    static void check_not_followed(const char* list, const std::vector<TensorReference>& references, bool is_written);
    static void bump_versions(const std::vector<TensorReference>& references);
    // tensors: [...] each.
    static std::vector<TensorReference> references_to(const Tensors& tensors);
    static Layout layout_of(const Tensors& tensors,   // [...] each
                            const Tensors& sources);  // [...] each, or none

    Layout layout_;
    std::vector<TensorReference> tensors_;
    std::vector<TensorReference> sources_;
    at::Tensor table_, chunks_, partial_;
    at::ScalarType norm_dtype_ = at::kFloat;
    bool may_accumulate_ = true;
};

}  // namespace te_graph::multi_tensor
