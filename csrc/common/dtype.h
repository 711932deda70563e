// Dtypes as kernels and CPU loops get them. No Torch here.
#pragma once

#include <cstdint>

namespace te_graph {

enum class DType : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

// How many consecutive elements of 2, 4 or 8 bytes a thread takes at a time: 16 bytes.
template <typename T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

}  // namespace te_graph
