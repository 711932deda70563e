// Whether a weight is as it was at a time before.
#pragma once

#include <ATen/core/Tensor.h>

#include "fp8/data_writes.h"

namespace te_graph::fp8 {

class WeightMark {
public:
    // Of no weight.
    WeightMark();
    // Of weight [O, I] or [I, O] as it is now, by its memory, how it lies there, and how often that was written.
    explicit WeightMark(const at::Tensor& weight);

    // Whether it is of weight [O, I] or [I, O], and that has not changed.
    bool is_of(const at::Tensor& weight) const;
    // Whether it is of the storage of weight [O, I] or [I, O], and nothing has been written there.
    bool is_of_storage(const at::Tensor& weight) const;

private:
    // Held weakly, so that no other one takes its place in memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
    const void* address_ = nullptr;
    at::DimVector sizes_, strides_;
    caffe2::TypeMeta dtype_;
    WriteCount writes_;
};

}  // namespace te_graph::fp8
