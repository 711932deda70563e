// The FP8 formats. No Torch here.
#pragma once

#include <cstdint>
#include <iterator>

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

}  // namespace te_graph::fp8
