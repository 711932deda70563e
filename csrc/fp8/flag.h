// Flags in device memory. No Torch here.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace te_graph::fp8 {

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

}  // namespace te_graph::fp8
