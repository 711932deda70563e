// Why a group was given up, where the host alone knows of it.
#pragma once

#include <c10/util/Exception.h>

#include <mutex>
#include <string>

#include "collectives/notice.h"

namespace te_graph::collectives {

class Trouble {
public:
    // The first one stays.
    void note(const std::string& why) {
        const std::lock_guard lock(mutex_);
        if (why_.empty()) why_ = why;
        is_some_group_given_up.store(true, std::memory_order_relaxed);
    }
    void note_abort(const std::string& group, int rank) {
        note("group " + group + " was given up on rank " + std::to_string(rank) + ": abort() was called");
    }
    // Throws if there is one; `op` is whoever asks.
    void check(const char* op) const {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK(why_.empty(), op, ": ", why_);
    }

private:
    mutable std::mutex mutex_;
    std::string why_;
};

}  // namespace te_graph::collectives
