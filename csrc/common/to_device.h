// Tables that kernels read: rows of host memory as a tensor on the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "common/cpu_only.h"

namespace te_graph {

// [rows, columns] of `dtype`, a copy that is complete on return. `columns`: of that dtype in a row.
template <typename Row>
at::Tensor to_device(std::vector<Row>& rows, int64_t columns, at::ScalarType dtype, at::Device device) {
    check_is_built_for(device);
    const auto options = at::TensorOptions().dtype(dtype);
    const auto count = static_cast<int64_t>(rows.size());
    const at::Tensor result = at::zeros({count, columns}, options.device(device));
    return count == 0 ? result : result.copy_(at::from_blob(rows.data(), {count, columns}, options));
}

}  // namespace te_graph
