// Tensors that an op would write twice, or write and read, in lists of any length. Told by where they begin, which is
// fast: one look for each.
#pragma once

#include <ATen/core/Tensor.h>

namespace te_graph::multi_tensor {

// Raises if two tensors that are written, or a written and a read one, begin at the same address.
void check_distinct(const char* op,
                    at::TensorList written,  // [...] each
                    at::TensorList read);    // [...] each

}  // namespace te_graph::multi_tensor
