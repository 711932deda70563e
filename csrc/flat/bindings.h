// What Python gets of flat parameters and gradients.
#pragma once

#include <pybind11/pybind11.h>

namespace te_graph::flat {

void bind(pybind11::module_& m);

}  // namespace te_graph::flat
