// What an op does on the host before it launches, noted while it is captured, so that replays do it, too.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "common/grad_buffers.h"

namespace te_graph {

enum class Direction { kForward, kBackward };
constexpr Direction kDirections[] = {Direction::kForward, Direction::kBackward};

class HostStep {
public:
    virtual ~HostStep() = default;
    // What has changed so that a replay would be wrong, as "... changed"; empty: nothing. With the GIL.
    virtual std::string change() const { return {}; }
    // Why this one call is to run eagerly, whatever else is as at capture, as "called ..."; empty: nothing. With the
    // GIL.
    virtual std::string obstacle() const { return {}; }
    // Before each replay. What it launches runs before the graph, on the current stream. All steps are prepared before
    // one is done.
    virtual void prepare() {}
    virtual void run() {}
    // Of a forward: what was to be captured has been, on this thread.
    virtual void end_capture() {}
    // After each replay has been launched, and the versions of what a forward writes moved on.
    virtual void finish() {}
    // Steps of which this is equal do the same.
    virtual const void* identity() const = 0;
    // Whether it has to come between a graph that `other` is of and its own.
    virtual bool repeats(const HostStep& other) const { return identity() == other.identity(); }
};

// The steps of one graph, or of a forward and its backward.
class HostSteps {
public:
    using List = std::vector<std::shared_ptr<HostStep>>;

    // Those of what this thread captures, or warms up for a capture; nullptr: it does neither. A backward runs on
    // another thread, and finds its steps in what the forward kept for it.
    static std::shared_ptr<HostSteps> current();
    // From here to leave(), on this thread, current() is `steps`.
    static void enter(std::shared_ptr<HostSteps> steps);
    static void leave();
    // What enters steps that all have left notes what a backward of its own does, in which a forward is computed again:
    // of a graph that holds the backward as well, nobody has left them by then.
    Direction direction() const { return has_ended_ ? Direction::kBackward : Direction::kForward; }

    // False if there is one that does the same.
    bool add(Direction direction, std::shared_ptr<HostStep> step);
    // All of `other` that there are not yet.
    void add(const HostSteps& other);
    // The one of this identity; nullptr: there is none.
    HostStep* find(Direction direction, const void* identity) const;

    const List& of(Direction direction) const { return lists_[static_cast<size_t>(direction)]; }

    // Of the backward that is captured, or warmed up.
    GradBuffers& grad_buffers() { return grad_buffers_; }

    // Before a replay of what has these steps; of several at once, all are prepared first.
    void prepare(Direction direction) const;
    void run(Direction direction) const;
    // After it.
    void finish(Direction direction) const;

private:
    std::array<List, 2> lists_;  // of each direction
    std::atomic<int> entered_ = 0;
    std::atomic<bool> has_ended_ = false;  // the forward
    GradBuffers grad_buffers_;
};

}  // namespace te_graph
