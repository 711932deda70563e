// Element type of a dtype.
#pragma once

#include <c10/core/ScalarType.h>

#include "collectives/peers.h"

namespace te_graph::collectives {

inline Element element_of(at::ScalarType dtype) {
    return dtype == at::kFloat      ? Element::kFloat32
           : dtype == at::kHalf     ? Element::kFloat16
           : dtype == at::kBFloat16 ? Element::kBFloat16
                                    : Element::kBytes;
}

}  // namespace te_graph::collectives
