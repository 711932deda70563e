#include "collectives/watchdog.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "collectives/notice.h"

namespace te_graph::collectives {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kRound{100};

}  // namespace

struct Watchdog::State {
    void watch(const Record* record, double patience, const std::function<std::string()>& message) {
        std::unique_lock lock(mutex);
        Clock::time_point since{};
        while (!wake.wait_for(lock, kRound, [&] { return is_over; })) {
            if (static_cast<const volatile Record*>(record)->is_set == 0) continue;
            is_some_group_given_up.store(true, std::memory_order_relaxed);
            if (since == Clock::time_point{}) since = Clock::now();
            if (patience <= 0 || std::chrono::duration<double>(Clock::now() - since).count() < patience) continue;
            std::fprintf(stderr, "te_graph: %s. Nobody asked for %g s, so this process ends.\n", message().c_str(),
                         patience);
            std::fflush(stderr);
            std::_Exit(1);
        }
    }

    std::mutex mutex;
    std::condition_variable wake;
    bool is_over = false;
    std::once_flag joined;
    std::thread thread;
};

Watchdog::Watchdog(const Record* record, double patience, std::function<std::string()> message)
    : state_(std::make_unique<State>()) {
    state_->thread = std::thread([state = state_.get(), record, patience, message = std::move(message)] {
        state->watch(record, patience, message);
    });
}

Watchdog::~Watchdog() { acknowledge(); }

void Watchdog::acknowledge() {
    {
        const std::lock_guard lock(state_->mutex);
        state_->is_over = true;
    }
    state_->wake.notify_all();
    // Any number of threads may be told at the same time.
    std::call_once(state_->joined, [&] { state_->thread.join(); });
}

}  // namespace te_graph::collectives
