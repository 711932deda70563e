// Vectors of any stride. No Torch here.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace te_graph::fp8 {

// A vector whose elements lie `stride` apart, such as one column in three of a table.
template <typename T>
struct Strided {
    T* data;
    int64_t stride;
    TE_GRAPH_HOST_DEVICE T& operator[](int64_t i) const { return data[i * stride]; }
};

}  // namespace te_graph::fp8
