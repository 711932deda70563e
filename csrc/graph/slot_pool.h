// Which of a callable's slots (graph pairs with their memory) hold activations that a backward still needs.
// No Torch here.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace te_graph::graph {

class SlotPool;

// Keeps one slot busy for as long as it lives; dropping it, on any thread, frees the slot.
class SlotLease {
public:
    SlotLease(std::shared_ptr<SlotPool> pool, int slot) : pool_(std::move(pool)), slot_(slot) {}
    SlotLease(SlotLease&& other) noexcept = default;
    SlotLease& operator=(SlotLease&&) = delete;
    SlotLease(const SlotLease&) = delete;
    SlotLease& operator=(const SlotLease&) = delete;
    inline ~SlotLease();

    int slot() const { return slot_; }

private:
    std::shared_ptr<SlotPool> pool_;
    int slot_;
};

class SlotPool : public std::enable_shared_from_this<SlotPool> {
public:
    // The first free slot, or -1 when all `size()` are in flight. It stays busy until the lease on it is dropped.
    int first_free() const {
        const std::lock_guard lock(mutex_);
        for (size_t slot = 0; slot < busy_.size(); ++slot) {
            if (!busy_[slot]) return static_cast<int>(slot);
        }
        return -1;
    }

    SlotLease lease(int slot) {
        const std::lock_guard lock(mutex_);
        busy_[slot] = true;
        return {shared_from_this(), slot};
    }

    void add() {
        const std::lock_guard lock(mutex_);
        busy_.push_back(false);
    }

    int size() const {
        const std::lock_guard lock(mutex_);
        return static_cast<int>(busy_.size());
    }

    int in_flight() const {
        const std::lock_guard lock(mutex_);
        int count = 0;
        for (const bool busy : busy_) count += busy;
        return count;
    }

private:
    friend class SlotLease;
    void release(int slot) {
        const std::lock_guard lock(mutex_);
        busy_[slot] = false;
    }

    mutable std::mutex mutex_;
    std::vector<bool> busy_;
};

SlotLease::~SlotLease() {
    if (pool_) pool_->release(slot_);
}

}  // namespace te_graph::graph
