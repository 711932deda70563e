// Whether any group of ranks was aborted, for code that knows no group: replays must not continue with its results.
#pragma once

#include <atomic>

namespace te_graph {

// Set when a group is aborted; cleared by a check that finds no aborted group any more.
inline std::atomic<bool> any_group_aborted{false};

// Throws the error of the first aborted group; `caller` is for the message. Registered by the area that knows groups.
inline void (*check_all_groups)(const char* caller) = nullptr;

inline void check_groups(const char* caller) {
    if (any_group_aborted.load(std::memory_order_relaxed)) check_all_groups(caller);
}

}  // namespace te_graph
