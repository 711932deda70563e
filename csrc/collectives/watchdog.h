// Terminates a process in which the failure of a group remains unobserved.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "collectives/peers.h"

namespace te_graph::collectives {

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
