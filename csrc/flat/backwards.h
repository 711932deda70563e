// All backwards that write gradients of one FlatParameters. Backwards that are nested, or run at once, count as one: it
// begins with the first and ends with the last of them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include "flat/ready_buckets.h"

namespace te_graph::flat {

// What is called in a backward, without the GIL, on any thread; the backward raises what it raises.
struct BackwardCalls {
    std::function<bool()> begin;        // before the first gradient is written: whether its buckets are reduced
    std::function<void(size_t)> ready;  // a bucket is complete, and what writes it has been launched
    std::function<void(size_t)> end;    // all gradients have been written; the buckets before this one have been told
    // Before the next backward, if the last one failed while its buckets were being reduced. Buckets before this one
    // have been told here; other ranks may have come further, or less far.
    std::function<void(size_t)> fail;
};

class Backwards : public std::enable_shared_from_this<Backwards> {
public:
    Backwards(BackwardCalls calls, const std::vector<size_t>& bucket_sizes)
        : calls_(std::move(calls)), buckets_(bucket_sizes) {}

    // Before gradient number `gradient`, called `name`, is written.
    void enter(size_t gradient, const std::string& name);
    // What writes it has been launched on `stream`.
    void note_accumulated(size_t gradient, int64_t stream);
    // AccumulateGrad is about to write this gradient and will not report back: it has been written by the time that this
    // thread comes to its next gradient, or that the backward ends.
    void note_received(size_t gradient, int64_t stream);
    // Whether it is known early enough what may be reduced while the backward goes on.
    bool looks_early() const;
    // Tells of the backward before, if that has failed. Outside of backwards this waits for one that goes on, since it
    // may be about to fail.
    void finish_failed();

private:
    class Task;
    void begin(int64_t task);
    void leave(int64_t task);
    void abandon(int64_t task);
    // Whether it was there. Called with the lock held.
    bool erase(int64_t task);
    void flush_received();
    void tell_ready();

    const BackwardCalls calls_;
    std::atomic<int64_t> last_task_{-1};  // that has entered last, a short cut of begin()
    mutable std::mutex mutex_;
    std::set<int64_t> tasks_;  // of the engine, that have begun
    std::condition_variable no_tasks_;
    std::weak_ptr<torch::autograd::Node> outer_;  // of an outer task that has not begun, while one inside has ended
    bool is_under_way_ = false;                   // a backward, which the following is about
    bool reduces_ = false;                        // its buckets, as they become ready
    ReadyBuckets buckets_;
    std::optional<int64_t> stream_;  // on which its gradients are written
    // The gradient that AccumulateGrad writes on each thread, and on which stream.
    std::map<std::thread::id, std::pair<size_t, int64_t>> pending_by_thread_;
};

}  // namespace te_graph::flat
