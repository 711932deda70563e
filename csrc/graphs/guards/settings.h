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

namespace te_graph::graphs {

class Settings {
public:
    // The present ones. with_modes: modes of this thread are among them, the grad mode and `with torch.device(...)`.
    // with_autocast_cache: whether autocast keeps its casts is one of them. With the GIL: some are variables of Python
    // modules.
    explicit Settings(c10::DeviceType device, bool with_modes = false, bool with_autocast_cache = false);
    // Empty while they are the present ones, else which one differs. With the GIL.
    std::string change() const;

private:
    static constexpr size_t kCount = 40;
    using Values = std::array<int32_t, kCount>;
    static Values read(c10::DeviceType device, bool with_modes, bool with_autocast_cache);

    c10::DeviceType device_;
    bool with_modes_, with_autocast_cache_;
    Values values_;
};

}  // namespace te_graph::graphs
