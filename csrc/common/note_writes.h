// Versions of tensors, which tell autograd, and caches of what a tensor is made into, that an op wrote it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace te_graph {

// tensor: [...]. How often it was written; 0 of one made in inference mode, which has no counter.
inline uint32_t version_of(const at::Tensor& tensor) {
    c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    return impl.is_inference() ? 0 : impl.version_counter().current_version();
}

// tensor: [...].
inline void note_write(const at::Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// tensors: [...] each, those that are there.
inline void note_writes(std::initializer_list<std::optional<at::Tensor>> tensors) {
    for (const auto& tensor : tensors) {
        if (tensor) note_write(*tensor);
    }
}

}  // namespace te_graph
