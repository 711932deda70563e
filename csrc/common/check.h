// Argument checks of the ops: one sentence with op, argument, expected and got.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "common/dtype_name.h"

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAException.h>
#endif

namespace te_graph {

using MaybeTensor = std::optional<at::Tensor>;
// tensor: [...] or undefined.
inline MaybeTensor if_defined(const at::Tensor& tensor) {
    return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

// tensor: [...].
inline void check_dtype(const char* op, const char* argument, const at::Tensor& tensor, at::ScalarType expected) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == expected, op, ": expected ", argument, " of dtype ", dtype_name(expected),
                     ", got ", dtype_name(tensor.scalar_type()));
}

// tensor: [...].
inline void check_device(const char* op, const char* argument, const at::Tensor& tensor, at::Device expected) {
    TORCH_CHECK_VALUE(tensor.device() == expected, op, ": expected ", argument, " on ", expected, ", got ",
                      tensor.device());
}

// tensor: [...], or undefined.
inline void check_strided(const char* op, const char* argument, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(tensor.defined(), op, ": expected ", argument, " to be a tensor, got None");
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, op, ": expected ", argument, " of layout Strided, got ",
                      tensor.layout());
}

// arguments: [...] each, those that are there: all where the op's device is.
inline void check_devices(const char* op, at::Device expected,
                          std::initializer_list<std::pair<const char*, std::optional<at::Tensor>>> arguments) {
    for (const auto& [name, tensor] : arguments) {
        if (tensor) check_device(op, name, *tensor, expected);
    }
}

// tensor: [] or [1].
inline void check_one(const char* op, const char* argument, const at::Tensor& tensor, at::Device device) {
    check_strided(op, argument, tensor);
    TORCH_CHECK_VALUE(tensor.numel() == 1, op, ": expected ", argument, " of one element, got shape ", tensor.sizes());
    check_device(op, argument, tensor, device);
}

// Of what an op writes, tensor [...]: not an inference tensor, outside of inference mode, as in torch. It has no
// version counter that could show the write; and the flag of a group is one, so that only the group writes it.
inline void check_writable(const char* op, const char* argument, const at::Tensor& tensor) {
    TORCH_CHECK(!tensor.is_inference() || c10::InferenceMode::is_enabled(), op, ": expected ", argument,
                " made outside of inference mode, got an inference tensor; clone() it, or write it in that mode. "
                "PeerGroup.found_inf is one: give the op a flag of its own, and merge both with "
                "torch.maximum(flag, group.found_inf, out=flag)");
}

// tensor: [...]. False for tensor subclasses that wrap others, and where there are elements but no bytes: lazily zero
// or fake tensors, those on meta, and storages that were freed.
inline bool has_memory(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (impl.is_python_dispatch() || !impl.has_storage()) return false;
    return impl.numel() == 0 || impl.unsafe_storage().unsafeGetStorageImpl()->data() != nullptr;
}

// Of tensors whose values are not what lies in their memory.
constexpr c10::DispatchKeySet kDeferred({c10::DispatchKey::Negative, c10::DispatchKey::Conjugate,
                                         c10::DispatchKey::ZeroTensor});

// Of what a table in device memory is to name by its address. tensor: [...].
inline void check_has_memory(const char* op, const std::string& argument, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(has_memory(tensor), op, ": expected ", argument,
                     " with memory of its own, got a tensor without, or one that wraps another, such as a DTensor; "
                     "give what is inside");
    TORCH_CHECK_VALUE(!tensor.key_set().has_any(kDeferred), op, ": expected ", argument,
                      " that is materialized, got one that is negated or conjugated lazily; use resolve_neg()");
}

// tensor: [rows, columns], contiguous.
inline void check_table(const char* op, const char* argument, const at::Tensor& tensor, int64_t columns) {
    TORCH_CHECK_VALUE(tensor.dim() == 2 && tensor.size(1) == columns && tensor.is_contiguous(), op, ": expected ",
                      argument, " to be contiguous of shape [n, ", columns, "], got ", tensor.sizes(), " with strides ",
                      tensor.strides());
}

}  // namespace te_graph
