// Where a tensor lies and how, to be recognised again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <vector>

namespace te_graph::graphs {

// Compared for every parameter at every call, so nothing here leaves the caller's code except on a difference.
class TensorFacts {
public:
    TensorFacts() = default;
    explicit TensorFacts(const at::Tensor& tensor)
        : base_(base_of(*tensor.unsafeGetTensorImpl())),
          offset_(tensor.storage_offset()),
          dtype_(tensor.dtype()),
          device_(tensor.device()),
          is_conj_(tensor.is_conj()),
          is_neg_(tensor.is_neg()),
          sizes_(tensor.sizes().begin(), tensor.sizes().end()),
          strides_(tensor.strides().begin(), tensor.strides().end()) {
        if (tensor.has_names()) names_ = tensor.names().vec();
    }

    bool is_address_of(const c10::TensorImpl& impl) const {
        return base_of(impl) == base_ && impl.storage_offset() == offset_;
    }
    // Conjugate and negative views read their memory as something else.
    bool has_bits_of(const at::Tensor& tensor) const {
        return tensor.is_conj() == is_conj_ && tensor.is_neg() == is_neg_;
    }
    bool has_names_of(const at::Tensor& tensor) const {
        if (!tensor.unsafeGetTensorImpl()->has_named_tensor_meta()) return names_.empty();
        return tensor.has_names() ? tensor.names() == at::DimnameList(names_) : names_.empty();
    }
    bool match(const at::Tensor& tensor) const {
        const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
        return is_address_of(impl) && impl.dtype() == dtype_ && are_equal(impl.sizes(), sizes()) &&
               are_equal(impl.strides(), strides()) && has_bits_of(tensor) && has_names_of(tensor);
    }

    // All but where it lies.
    bool has_form_of(const at::Tensor& tensor) const {
        const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
        return impl.dtype() == dtype_ && impl.device() == device_ && are_equal(impl.sizes(), sizes()) &&
               are_equal(impl.strides(), strides()) && has_bits_of(tensor) && has_names_of(tensor);
    }

    c10::Device device() const { return device_; }
    at::ScalarType dtype() const { return c10::typeMetaToScalarType(dtype_); }
    at::IntArrayRef sizes() const { return sizes_; }
    at::IntArrayRef strides() const { return strides_; }

private:
    // Of the storage, also where the tensor has no elements.
    static const void* base_of(const c10::TensorImpl& impl) {
        const c10::StorageImpl* const storage = impl.unsafe_storage().unsafeGetStorageImpl();
        return storage ? storage->data_ptr().get() : nullptr;
    }
    static bool are_equal(at::IntArrayRef a, at::IntArrayRef b) {
        if (a.size() != b.size()) return false;
        for (size_t i = 0; i < a.size(); ++i) {
            if (a[i] != b[i]) return false;
        }
        return true;
    }

    const void* base_ = nullptr;
    int64_t offset_ = 0;
    caffe2::TypeMeta dtype_;
    c10::Device device_ = at::kCPU;
    bool is_conj_ = false, is_neg_ = false;
    c10::SmallVector<int64_t, 4> sizes_, strides_;
    std::vector<at::Dimname> names_;  // of the dimensions; empty: none has one
};

}  // namespace te_graph::graphs
