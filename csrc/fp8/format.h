// The FP8 formats, and what every FP8 op takes: flags and scales in device memory. No Torch here.
#pragma once

#include <cstdint>
#include <iterator>

#include "common/dtype.h"
#include "common/host_device.h"

namespace te_graph::fp8 {

enum class Format : uint8_t { kE4M3, kE5M2 };
constexpr Format kFormats[] = {Format::kE4M3, Format::kE5M2};

// As in torch.
constexpr const char* name_of(Format format) { return format == Format::kE4M3 ? "float8_e4m3fn" : "float8_e5m2"; }

// The largest number of the format.
TE_GRAPH_HOST_DEVICE constexpr float max_of(Format format) { return format == Format::kE4M3 ? 448.0f : 57344.0f; }

// Calls function.operator()<kFormat>(), on the host.
template <typename Function>
auto with_format(Format format, const Function& function) {
    if (format == Format::kE4M3) return function.template operator()<Format::kE4M3>();
    return function.template operator()<Format::kE5M2>();
}

// A one-element tensor that is read when the kernel runs: set unless it is 0. Nothing where there is none.
struct Flag {
    enum class Kind : uint8_t { kNone, kInt32, kBool, kFloat32 };
    const void* data = nullptr;
    Kind kind = Kind::kNone;
};

TE_GRAPH_HOST_DEVICE inline bool is_set(const Flag& flag) {
    switch (flag.kind) {
        case Flag::Kind::kInt32:
            return *static_cast<const int32_t*>(flag.data) != 0;
        case Flag::Kind::kBool:
            return *static_cast<const bool*>(flag.data);
        case Flag::Kind::kFloat32:
            return *static_cast<const float*>(flag.data) != 0;
        case Flag::Kind::kNone:
            break;
    }
    return false;
}

// A vector whose elements lie `stride` apart, such as one column in three of a table.
template <typename T>
struct Strided {
    T* data;
    int64_t stride;
    TE_GRAPH_HOST_DEVICE T& operator[](int64_t i) const { return data[i * stride]; }
};

}  // namespace te_graph::fp8
