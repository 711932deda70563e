// The factor of a scaling or a clip (scale.h), computed alike on host and device.
#pragma once

#include <cmath>

#include "multi_tensor/exact_sum.h"
#include "multi_tensor/scale.h"

namespace te_graph::multi_tensor {

TE_GRAPH_HOST_DEVICE inline double read(const Scalar& scalar) {
    if (scalar.data == nullptr) return scalar.value;
    return scalar.is_double ? *static_cast<const double*>(scalar.data) : *static_cast<const float*>(scalar.data);
}

// torch computes 1 / (norm + eps) * max_norm in the norm's dtype, one operation after the other.
template <typename Real>
TE_GRAPH_HOST_DEVICE Real clip_factor(Real norm, Real max_norm, Real eps) {
    const Real factor = Real{1} / (norm + eps) * max_norm;
    return factor > 1 ? Real{1} : factor;
}

TE_GRAPH_HOST_DEVICE inline double factor_of(const Scaling& scaling) {
    const double value = read(scaling.scale);
    if (!scaling.is_clip) return value;
    if (scaling.scale.is_double) return clip_factor<double>(value, scaling.max_norm, scaling.eps);
    return clip_factor<float>(static_cast<float>(value), static_cast<float>(scaling.max_norm),
                              static_cast<float>(scaling.eps));
}

template <typename Real>
TE_GRAPH_HOST_DEVICE bool is_finite(Real value) {
    return value - value == 0;
}

// Whether a clip must leave its tensors alone for the sake of found_inf, which it then sets.
TE_GRAPH_HOST_DEVICE inline bool is_refused(const Scaling& scaling) {
    return scaling.is_clip && scaling.found_inf != nullptr &&
           (*scaling.found_inf != 0 || !is_finite(read(scaling.scale)));
}

}  // namespace te_graph::multi_tensor
