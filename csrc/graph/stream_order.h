// What the graphs of one capture scope share: the order of their replays and the gradients they have handed out.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>

#include "graph/handout.h"

namespace te_graph::graph {

// All backward graphs of one make_graphed_callables call use one memory pool for what is born and freed inside a
// replay. That is right for any order of replays as long as they do not overlap, so a replay on another stream than the
// last one waits for it.
class Scope {
public:
    explicit Scope(at::Device device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    at::Device device() const { return device_; }

    // Makes the current stream wait for the last replay if that ran on another stream. No host sync.
    void enter();
    // The same for a backward, which has the memory that backwards share for as long as it holds the lock.
    std::unique_lock<std::mutex> enter_backward();

    // Input gradients live in the shared pool: any backward of the scope may overwrite them.
    Handouts& input_gradients() { return input_gradients_; }

private:
    struct Order;
    const at::Device device_;
    std::unique_ptr<Order> order_;
    Handouts input_gradients_;
    std::mutex backward_;
};

// True while the current stream of `device` is being captured by somebody.
bool is_capturing(at::Device device);

// Lets the stream on which the running backward call was made wait for what is now queued on the current stream. The
// engine does so for leaves only; a node that writes .grad by itself has to ask for it.
void sync_backward_caller(at::Device device);

}  // namespace te_graph::graph
