// Telling autograd, and whoever caches what a tensor is made into, that an op wrote it.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

namespace te_graph {

// tensor: [...].
inline void note_write(const at::Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// [...] each, those that are there.
inline void note_writes(std::initializer_list<std::optional<at::Tensor>> tensors) {
    for (const auto& tensor : tensors) {
        if (tensor) note_write(*tensor);
    }
}

}  // namespace te_graph
