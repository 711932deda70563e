// Why a group was aborted, for transports without kernels.
#pragma once

#include <c10/util/Exception.h>

#include <mutex>
#include <string>

#include "common/abort_flag.h"

namespace te_graph::collectives {

class AbortReason {
public:
    // The first one stays.
    void set(const std::string& why) {
        const std::lock_guard lock(mutex_);
        if (why_.empty()) why_ = why;
        any_group_aborted.store(true, std::memory_order_relaxed);
    }
    void set_aborted(const std::string& group, int rank) {
        set("group " + group + " was aborted on rank " + std::to_string(rank) + ": abort() was called");
    }
    // Throws if there is one. `op`: the caller, for the message.
    void check(const char* op) const {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK(why_.empty(), op, ": ", why_);
    }

private:
    mutable std::mutex mutex_;
    std::string why_;
};

}  // namespace te_graph::collectives
