// The backwards that write to the gradients of one FlatParameters, and what it does at their ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

namespace te_graph::flat {

class Backwards : public std::enable_shared_from_this<Backwards> {
public:
    // begin: before the first gradient of a backward is written; end: when all of the backward has been. Both are
    // called without the GIL, on any thread, inside the backward, which raises what they raise.
    Backwards(std::function<void()> begin, std::function<void()> end)
        : begin_(std::move(begin)), end_(std::move(end)) {}

    // By each gradient, before it is written.
    void enter();

private:
    void leave(int64_t task);

    const std::function<void()> begin_, end_;
    std::atomic<int64_t> last_{-1};  // of tasks_, that has entered last
    std::mutex mutex_;
    std::set<int64_t> tasks_;  // of the engine, that have begun
};

}  // namespace te_graph::flat
