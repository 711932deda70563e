// What autograd knows of a tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

namespace te_graph {

// nullptr: nothing. Called for every parameter at every call.
inline const torch::autograd::AutogradMeta* autograd_meta_of(c10::TensorImpl& tensor) {
    return static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
}
// tensor: [...].
inline const torch::autograd::AutogradMeta* autograd_meta_of(const at::Tensor& tensor) {
    return autograd_meta_of(*tensor.unsafeGetTensorImpl());
}

}  // namespace te_graph
