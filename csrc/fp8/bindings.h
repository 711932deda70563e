// What Python gets of the FP8 area beside the ops.
#pragma once

#include <pybind11/pybind11.h>

namespace te_graph::fp8 {

void bind(pybind11::module_& m);

}  // namespace te_graph::fp8
