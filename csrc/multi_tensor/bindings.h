// What Python gets of the multi-tensor area beside the ops.
#pragma once

#include <pybind11/pybind11.h>

namespace te_graph::multi_tensor {

void bind(pybind11::module_& m);
// The part of it that is Plan.
void bind_plan(pybind11::module_& m);

}  // namespace te_graph::multi_tensor
