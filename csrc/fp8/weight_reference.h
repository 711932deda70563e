// A weight that is found again by its memory, and not kept alive.
#pragma once

#include <ATen/core/Tensor.h>

namespace te_graph::fp8 {

class WeightReference {
public:
    // Of weight [O, I] or [I, O].
    explicit WeightReference(const at::Tensor& weight);

    // The weight, [O, I] or [I, O]. Where that tensor is gone, as one of `detach()` soon is, another one over its
    // memory with its counter of writes; undefined where the memory is gone as well.
    at::Tensor lock() const;
    bool is_gone() const { return tensor_.expired() && storage_.expired(); }

private:
    const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
    const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
    const c10::DispatchKeySet keys_;
    const caffe2::TypeMeta dtype_;
    const at::DimVector sizes_, strides_;
    const int64_t offset_;
    const c10::VariableVersion writes_;
};

}  // namespace te_graph::fp8
