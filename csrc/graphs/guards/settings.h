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
    // with_autocast_cache: whether autocast keeps its casts is one of them. with_autocast_dtype: so is the dtype of
    // regions that name none, which may begin inside. With the GIL: some are variables of Python modules.
    struct Choice {
        bool with_modes = false, with_autocast_cache = false, with_autocast_dtype = false;
    };
    Settings(c10::DeviceType device, Choice choice);
    // Empty while they are the present ones, else which one differs. With the GIL.
    std::string change() const;

private:
    static constexpr size_t kCount = 41;
    using Values = std::array<int32_t, kCount>;
    static Values read(c10::DeviceType device, Choice choice);

    c10::DeviceType device_;
    Choice choice_;
    Values values_;
};

}  // namespace te_graph::graphs
