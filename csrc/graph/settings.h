// Process-wide settings that a capture freezes: what kernels a replay runs does not follow them any more.
//
// They are what at::Context and torch.backends let a program choose that decides between kernels, dtypes or roundings,
// and what autocast does. Left out: what only warns or checks (sparse invariants, the filling of uninitialized memory),
// what the CPU does by itself at a replay as well (threads, denormals), and caches.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <string>

namespace te_graph::graph {

class Settings {
public:
    // With the GIL: some are variables of Python modules.
    static Settings current(c10::DeviceType device);
    // Empty when equal, else which setting differs.
    std::string difference(const Settings& now) const;

private:
    static constexpr size_t kCount = 37;
    std::array<int32_t, kCount> values_;
};

}  // namespace te_graph::graph
