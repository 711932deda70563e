// Ends a process that goes on although a group was given up, when nobody has looked for a while.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "collectives/peers.h"

namespace te_graph::collectives {

class Watchdog {
public:
    // record: outlives this. Once it is set, is_some_group_given_up is, too; when it is not acknowledged for `patience`
    // seconds, `message()` is printed and the process ends with exit status 1. patience 0: it never ends.
    Watchdog(const Record* record, double patience, std::function<std::string()> message);
    ~Watchdog();

    // Somebody has been told.
    void acknowledge();

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace te_graph::collectives
