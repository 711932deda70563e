// Argument checks of the ops: one sentence with op, argument, expected and got.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAException.h>
#endif

namespace te_graph {

inline void check_dtype(const char* op, const char* argument, const at::Tensor& tensor, at::ScalarType expected) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == expected, op, ": expected ", argument, " of dtype ", expected, ", got ",
                     tensor.scalar_type());
}

inline void check_device(const char* op, const char* argument, const at::Tensor& tensor, at::Device expected) {
    TORCH_CHECK_VALUE(tensor.device() == expected, op, ": expected ", argument, " on ", expected, ", got ",
                      tensor.device());
}

// A contiguous table of rows: [rows, columns].
inline void check_table(const char* op, const char* argument, const at::Tensor& tensor, int64_t columns) {
    TORCH_CHECK_VALUE(tensor.dim() == 2 && tensor.size(1) == columns && tensor.is_contiguous(), op, ": expected ",
                      argument, " to be contiguous of shape [n, ", columns, "], got ", tensor.sizes(), " with strides ",
                      tensor.strides());
}

}  // namespace te_graph
