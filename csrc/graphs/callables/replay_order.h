// What the graphs that are captured together share: the order of their replays and the gradients that they have lent.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "graphs/callables/lent_storages.h"

namespace te_graph::graphs {

// All backward graphs of one make_graphed_callables call use one memory pool for what is born and freed inside a
// replay. That is right for any order of replays as long as they do not overlap, so a replay on another stream than the
// last one waits for it.
class ReplayOrder {
public:
    explicit ReplayOrder(at::Device device);
    ~ReplayOrder();
    ReplayOrder(const ReplayOrder&) = delete;
    ReplayOrder& operator=(const ReplayOrder&) = delete;

    at::Device device() const { return device_; }

    // Makes the current stream wait for the last replay if that ran on another stream. No host sync.
    void enter();
    // The same for a forward.
    void enter_forward();
    // The same for a backward, which has the memory that backwards share for as long as it holds the lock.
    std::unique_lock<std::mutex> enter_backward();

    // Input gradients live in the shared pool: any backward of the group may overwrite them.
    LentStorages& input_gradients() { return input_gradients_; }
    // Whether forwards have come from several threads, or backwards. What the backward of one of them gives, another
    // one's must not overwrite: an operation may just read it, at an address that it has taken.
    bool is_of_several_threads() const { return is_of_several_threads_.load(std::memory_order_acquire); }

private:
    struct LastReplay;
    // Those that have come here; `first` of them.
    void note_thread(std::atomic<const void*>& first);

    const at::Device device_;
    std::unique_ptr<LastReplay> last_replay_;
    LentStorages input_gradients_;
    std::mutex backward_;
    // On a GPU all backwards come from one thread of autograd's, on the CPU from those of their callers.
    std::atomic<const void*> first_forward_{nullptr}, first_backward_{nullptr};
    std::atomic<bool> is_of_several_threads_{false};
};

// Lets the stream on which the running backward call was made wait for what is now queued on the current stream. The
// engine does so for leaves only; a node that writes .grad by itself has to ask for it.
void sync_backward_caller(at::Device device);

}  // namespace te_graph::graphs
