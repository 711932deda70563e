// Which of a callable's slots (graph pairs with their memory) hold activations that a backward still needs.
// No Torch here.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace te_graph::graphs {

class SlotLeases;

// Keeps one slot busy for as long as it lives. A slot is free when the last lease on it has been dropped, on any
// thread.
class SlotLease {
public:
    SlotLease(std::shared_ptr<SlotLeases> slots, int slot) : slots_(std::move(slots)), slot_(slot) {}
    SlotLease(SlotLease&& other) noexcept = default;
    SlotLease& operator=(SlotLease&&) = delete;
    SlotLease(const SlotLease&) = delete;
    SlotLease& operator=(const SlotLease&) = delete;
    inline ~SlotLease();

    int slot() const { return slot_; }

private:
    std::shared_ptr<SlotLeases> slots_;
    int slot_;
};

class SlotLeases : public std::enable_shared_from_this<SlotLeases> {
public:
    // predecessor: the slots whose results are read in place, each by the slot of its number, or null. A slot in
    // use keeps that slot busy, and so on: a result without a reader is still read, and must not be written
    // again.
    explicit SlotLeases(std::shared_ptr<SlotLeases> predecessor = nullptr) : predecessor_(std::move(predecessor)) {}

    bool is_free(int slot) const {
        const std::lock_guard lock(mutex_);
        return leases_[slot] == 0;
    }

    // A slot may be leased several times: by the node of its forward, and by the slot of a successor.
    SlotLease lease(int slot) {
        hold(slot);
        return {shared_from_this(), slot};
    }

    void add() {
        const std::lock_guard lock(mutex_);
        leases_.push_back(0);
    }

    int size() const {
        const std::lock_guard lock(mutex_);
        return static_cast<int>(leases_.size());
    }

    int in_flight() const {
        const std::lock_guard lock(mutex_);
        int count = 0;
        for (const int leases : leases_) count += leases > 0;
        return count;
    }

private:
    friend class SlotLease;
    // Locks are taken from a callable towards its predecessors, never the other way.
    void hold(int slot) {
        const std::lock_guard lock(mutex_);
        if (leases_[slot]++ == 0 && predecessor_) predecessor_->hold(slot);
    }
    void release(int slot) {
        const std::lock_guard lock(mutex_);
        if (--leases_[slot] == 0 && predecessor_) predecessor_->release(slot);
    }

    const std::shared_ptr<SlotLeases> predecessor_;
    mutable std::mutex mutex_;
    std::vector<int> leases_;
};

SlotLease::~SlotLease() {
    if (slots_) slots_->release(slot_);
}

}  // namespace te_graph::graphs
