// Names of dtypes for messages, as Python writes them.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace te_graph {

inline std::string dtype_name(at::ScalarType dtype) { return "torch." + c10::getDtypeNames(dtype).first; }

}  // namespace te_graph
