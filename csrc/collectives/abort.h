// Aborted groups on the host: why, and a watchdog of failures that remain unobserved.
#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "common/abort_flag.h"

namespace te_graph::collectives {

struct FailureRecord;

// Why a group was aborted, for transports without kernels.
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

// Terminates a process in which the failure of a group remains unobserved.
class Watchdog {
public:
    // record: outlives this. Once it is set, any_group_aborted is set, too; if it is not acknowledged within `timeout`
    // seconds, `message()` is printed and the process exits with status 1. timeout 0: never.
    Watchdog(const FailureRecord* record, double timeout, std::function<std::string()> message);
    ~Watchdog();

    // The failure has been observed.
    void acknowledge();

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace te_graph::collectives
