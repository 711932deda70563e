#include "fp8/weight_reference.h"

namespace te_graph::fp8 {

WeightReference::WeightReference(const at::Tensor& weight)
    : tensor_(weight.getIntrusivePtr()),
      storage_(weight.storage().getWeakStorageImpl()),
      keys_(weight.key_set()),
      dtype_(weight.dtype()),
      sizes_(weight.sizes()),
      strides_(weight.strides()),
      offset_(weight.storage_offset()),
      writes_(weight.unsafeGetTensorImpl()->version_counter()) {}

at::Tensor WeightReference::lock() const {
    if (auto tensor = tensor_.lock(); tensor.defined()) return at::Tensor(std::move(tensor));
    auto storage = storage_.lock();
    if (!storage) return {};
    auto tensor = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)), keys_, dtype_);
    tensor->set_sizes_and_strides(sizes_, strides_, offset_);
    tensor->set_version_counter(writes_);
    return at::Tensor(std::move(tensor));
}

}  // namespace te_graph::fp8
