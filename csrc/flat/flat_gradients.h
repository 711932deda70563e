// Gradients that are read, written and dropped together, and how replays of what does that know of it.
#pragma once

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
    // Numbers of those that are there, and that this rank alone has.
    Numbers unreduced() const;
    // Numbers of those that have been reduced: more comes to them now. And of those that have been taken so since the
    // last reduction, and have not been dropped.
    Numbers take_reduced();
    Numbers taken() const;

    // Does what `event` means on the host, now and in each replay of the capture under way. For kRead a replay also
    // checks that the same gradients are there as at capture, and none outside of the buffer.
    void note(Event event);

private:
    class Step;
    template <typename Predicate>
    Numbers numbers_of(Predicate holds) const;
    void run(Event event);

    const Pointers gradients_;
    const char identities_[static_cast<size_t>(Event::kCount)] = {};  // an address for each event
};

}  // namespace te_graph::flat
