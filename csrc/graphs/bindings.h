// What Python sees of graph handles and replay objects, as `te_graph._C`.
#pragma once

#include <pybind11/pybind11.h>

namespace te_graph::graphs {

void bind(pybind11::module_& m);

// Part of bind(): captured graphs and the nodes of te_graph's own kernels in them.
void bind_nodes(pybind11::module_& m);

}  // namespace te_graph::graphs
