#include "fp8/weight_mark.h"

namespace te_graph::fp8 {

WeightMark::WeightMark() : storage_(c10::intrusive_ptr<c10::StorageImpl>()) {}

WeightMark::WeightMark(const at::Tensor& weight)
    : storage_(weight.storage().getWeakStorageImpl()),
      address_(weight.const_data_ptr()),
      sizes_(weight.sizes()),
      strides_(weight.strides()),
      dtype_(weight.dtype()),
      writes_(write_count(weight)) {}

bool WeightMark::is_of(const at::Tensor& weight) const {
    // The storage first: a weight may have become anything, and some kinds have no address or sizes to ask for.
    return is_of_storage(weight) && !weight.is_nested() && weight.const_data_ptr() == address_ &&
           weight.sizes() == at::IntArrayRef(sizes_) && weight.strides() == at::IntArrayRef(strides_) &&
           weight.dtype() == dtype_;
}

bool WeightMark::is_of_storage(const at::Tensor& weight) const {
    return weight.has_storage() && weight.storage().unsafeGetStorageImpl() == storage_._unsafe_get_target() &&
           !is_written_since(weight, writes_);
}

}  // namespace te_graph::fp8
