// The factor of a rescaling (rescale.h), computed alike on host and device.
#pragma once

#include <cmath>

#include "multi_tensor/exact_sum.h"
#include "multi_tensor/rescale.h"

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

TE_GRAPH_HOST_DEVICE inline double factor_of(const Rescaling& rescaling) {
    const double value = read(rescaling.scale);
    if (!rescaling.is_clip) return value;
    if (rescaling.scale.is_double) return clip_factor<double>(value, rescaling.max_norm, rescaling.eps);
    return clip_factor<float>(static_cast<float>(value), static_cast<float>(rescaling.max_norm),
                              static_cast<float>(rescaling.eps));
}

template <typename Real>
TE_GRAPH_HOST_DEVICE bool is_finite(Real value) {
    return value - value == 0;
}

// Whether a clip must leave its tensors alone for the sake of found_inf, which it then sets.
TE_GRAPH_HOST_DEVICE inline bool is_refused(const Rescaling& rescaling) {
    return rescaling.is_clip && rescaling.found_inf != nullptr &&
           (*rescaling.found_inf != 0 || !is_finite(read(rescaling.scale)));
}

}  // namespace te_graph::multi_tensor
