// Whether the next gradient overwrites main_grad.
#pragma once

#include <atomic>

namespace te_graph {

// Set by reset_main_grads, until a gradient has been stored. One per parameter, shared by all that compute one.
struct StoreFlag {
    std::atomic<bool> overwrite{false};
};

}  // namespace te_graph
