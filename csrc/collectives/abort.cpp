#include "collectives/abort.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "collectives/peers.h"

namespace te_graph::collectives {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kPollInterval{100};

}  // namespace

struct Watchdog::State {
    void watch(const FailureRecord* record, double timeout, const std::function<std::string()>& message) {
        std::unique_lock lock(mutex);
        Clock::time_point since{};
        while (!wake.wait_for(lock, kPollInterval, [&] { return is_over; })) {
            if (static_cast<const volatile FailureRecord*>(record)->is_set == 0) continue;
            any_group_aborted.store(true, std::memory_order_relaxed);
            if (since == Clock::time_point{}) since = Clock::now();
            if (timeout <= 0 || std::chrono::duration<double>(Clock::now() - since).count() < timeout) continue;
            std::fprintf(stderr, "te_graph: %s. Failure unobserved for %g s; terminating.\n", message().c_str(),
                         timeout);
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

Watchdog::Watchdog(const FailureRecord* record, double timeout, std::function<std::string()> message)
    : state_(std::make_unique<State>()) {
    state_->thread = std::thread([state = state_.get(), record, timeout, message = std::move(message)] {
        state->watch(record, timeout, message);
    });
}

Watchdog::~Watchdog() { acknowledge(); }

void Watchdog::acknowledge() {
    {
        const std::lock_guard lock(state_->mutex);
        state_->is_over = true;
    }
    state_->wake.notify_all();
    // Several threads may acknowledge at the same time.
    std::call_once(state_->joined, [&] { state_->thread.join(); });
}

}  // namespace te_graph::collectives
