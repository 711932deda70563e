// Lets code that knows no group see that one was given up: replays must not go on with what it left.
#pragma once

#include <atomic>

namespace te_graph::collectives {

// Set when a group is given up; cleared by a look that finds none any more.
inline std::atomic<bool> is_some_group_given_up{false};

// Throws what the first group says that was given up. `who`: whoever asks.
void check_all_groups(const char* who);

inline void check_groups(const char* who) {
    if (is_some_group_given_up.load(std::memory_order_relaxed)) check_all_groups(who);
}

}  // namespace te_graph::collectives
