// Whether the next gradient overwrites main_grad.
#pragma once

#include <atomic>

namespace te_graph {

// Asked for by reset_main_grads, and pending until a gradient has been stored. One per parameter, shared by all that
// compute one.
struct MainGradReset {
    std::atomic<bool> is_pending{false};
};

}  // namespace te_graph
