// What Python gets of the collectives beside the ops.
#pragma once

#include <pybind11/pybind11.h>

namespace te_graph::collectives {

void bind(pybind11::module_& m);

}  // namespace te_graph::collectives
