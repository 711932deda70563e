// Gradients that are read, written and dropped together, and how replays of what does that know of it.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flat/flat_gradient.h"

namespace te_graph::flat {

class FlatGradients : public std::enable_shared_from_this<FlatGradients> {
public:
    using Pointers = std::vector<std::shared_ptr<FlatGradient>>;
    using Numbers = std::vector<size_t>;
    enum class Event { kRead, kWritten, kReduced, kStepped, kParametersWritten, kDropped, kCount };

    explicit FlatGradients(Pointers gradients) : gradients_(std::move(gradients)) {}

    const Pointers& gradients() const { return gradients_; }
    // What has happened to the first parameter that is no longer flat; empty: nothing.
    std::string first_change() const;
    // Numbers of those that are not there, and of those whose gradient is another tensor [...], with that.
    Numbers missing() const;
    std::vector<std::pair<size_t, at::Tensor>> elsewhere() const;
    // Whether they have been reduced since take_reduced() was called last, at the beginning of a backward.
    bool is_reduced() const { return is_reduced_; }
    bool take_reduced() { return is_reduced_.exchange(false); }

    // Does what `event` means on the host, now and in each replay of the capture under way. For kRead a replay also
    // checks that the same gradients are there as at capture, and none outside of the buffer.
    void note(Event event);

private:
    class Step;
    void run(Event event);

    const Pointers gradients_;
    const char identities_[static_cast<size_t>(Event::kCount)] = {};  // an address for each event
    std::atomic<bool> is_reduced_{false};
};

}  // namespace te_graph::flat
