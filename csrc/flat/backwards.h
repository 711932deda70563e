// The backwards that write to the gradients of one FlatParameters, and what it does in them.
#pragma once

#include <atomic>
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

#include "flat/ready_buckets.h"

namespace te_graph::flat {

// What is called in a backward, without the GIL, on any thread; the backward raises what it raises.
struct BackwardCalls {
    std::function<bool()> begin;        // before the first gradient is written: whether its buckets are reduced
    std::function<void(size_t)> ready;  // a bucket is complete, and what writes it has been launched
    std::function<void(size_t)> end;    // all gradients have been written; the buckets before this one have been told
};

class Backwards : public std::enable_shared_from_this<Backwards> {
public:
    Backwards(BackwardCalls calls, const std::vector<size_t>& bucket_sizes)
        : calls_(std::move(calls)), buckets_(bucket_sizes) {}

    // Before gradient number `gradient`, called `name`, is written.
    void enter(size_t gradient, const std::string& name);
    // What writes it has been launched on `stream`.
    void note_accumulated(size_t gradient, int64_t stream);
    // AccumulateGrad is about to write it: that has happened when this thread comes to the next one.
    void note_received(size_t gradient, int64_t stream);
    // Whether it is known early enough what may be reduced while the backward goes on.
    bool looks_early() const;

private:
    void begin(int64_t task);
    void leave(int64_t task);
    void flush_received();
    void tell_ready();

    const BackwardCalls calls_;
    std::atomic<int64_t> last_{-1};  // of tasks_, that has entered last
    mutable std::mutex mutex_;
    std::set<int64_t> tasks_;                                         // of the engine, that have begun
    ReadyBuckets buckets_;                                            // of the backward that is alone
    bool reduces_ = false;                                            // that one
    std::optional<int64_t> stream_;                                   // on which its gradients are written
    std::map<std::thread::id, std::pair<size_t, int64_t>> received_;  // by each thread, last, and on which stream
};

}  // namespace te_graph::flat
