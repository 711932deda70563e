// The slot state machine: free -> leased -> free, on whatever thread the lease is dropped.
#include "graph/slot_pool.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <type_traits>
#include <vector>

#include "seed.h"

namespace te_graph::graph {
namespace {

std::shared_ptr<SlotPool> pool_of(int slots) {
    auto pool = std::make_shared<SlotPool>();
    for (int i = 0; i < slots; ++i) pool->add();
    return pool;
}

TEST(SlotPool, WithoutSlotsHasNoneFree) {
    const auto pool = pool_of(0);
    EXPECT_EQ(pool->size(), 0);
    EXPECT_EQ(pool->in_flight(), 0);
    EXPECT_EQ(pool->first_free(), -1);
}

TEST(SlotPool, LendsTheLowestFreeSlotUntilAllAreInFlight) {
    const auto pool = pool_of(3);
    std::vector<SlotLease> leases;
    for (int slot = 0; slot < 3; ++slot) {
        EXPECT_EQ(pool->in_flight(), slot);
        ASSERT_EQ(pool->first_free(), slot);
        leases.push_back(pool->lease(slot));
        EXPECT_EQ(leases.back().slot(), slot);
    }
    EXPECT_EQ(pool->in_flight(), 3);
    EXPECT_EQ(pool->first_free(), -1);
    EXPECT_EQ(pool->size(), 3);
}

TEST(SlotPool, FirstFreeDoesNotTakeTheSlot) {
    const auto pool = pool_of(2);
    EXPECT_EQ(pool->first_free(), 0);
    EXPECT_EQ(pool->first_free(), 0);
    EXPECT_EQ(pool->in_flight(), 0);
}

TEST(SlotPool, ASlotAddedWhileAllAreInFlightIsFree) {
    const auto pool = pool_of(1);
    const SlotLease lease = pool->lease(0);
    EXPECT_EQ(pool->first_free(), -1);
    pool->add();
    EXPECT_EQ(pool->first_free(), 1);
    EXPECT_EQ(pool->in_flight(), 1);
}

TEST(SlotPool, DroppingALeaseFreesItsSlotAndNoOther) {
    const auto pool = pool_of(3);
    const SlotLease first = pool->lease(0);
    std::optional<SlotLease> middle(pool->lease(1));
    const SlotLease last = pool->lease(2);
    middle.reset();
    EXPECT_EQ(pool->in_flight(), 2);
    EXPECT_EQ(pool->first_free(), 1);
    const SlotLease again = pool->lease(1);
    EXPECT_EQ(pool->first_free(), -1);
}

TEST(SlotPool, FollowsAModelThroughRandomLeasesAndReleases) {
    auto generator = seeded_generator();
    const auto pool = pool_of(7);
    std::vector<std::optional<SlotLease>> leases(7);
    std::set<int> free{0, 1, 2, 3, 4, 5, 6};
    for (int step = 0; step < 2000; ++step) {
        ASSERT_EQ(pool->first_free(), free.empty() ? -1 : *free.begin());
        ASSERT_EQ(pool->in_flight(), 7 - static_cast<int>(free.size()));
        const int slot = static_cast<int>(generator() % 7);
        if (leases[slot]) {
            leases[slot].reset();
            free.insert(slot);
        } else if (!free.empty()) {
            const int lowest = pool->first_free();
            leases[lowest].emplace(pool->lease(lowest));
            free.erase(lowest);
        }
    }
}

TEST(SlotLease, OnlyTheOneMovedToFreesTheSlot) {
    const auto pool = pool_of(1);
    std::unique_ptr<SlotLease> target;
    {
        SlotLease source = pool->lease(0);
        target = std::make_unique<SlotLease>(std::move(source));
        EXPECT_EQ(target->slot(), 0);
    }
    EXPECT_EQ(pool->in_flight(), 1);  // the moved-from lease is gone and has freed nothing
    target.reset();
    EXPECT_EQ(pool->in_flight(), 0);
}

TEST(SlotLease, CannotBeCopiedOrAssigned) {
    EXPECT_FALSE(std::is_copy_constructible_v<SlotLease>);
    EXPECT_FALSE(std::is_copy_assignable_v<SlotLease>);
    EXPECT_FALSE(std::is_move_assignable_v<SlotLease>);
    EXPECT_TRUE(std::is_nothrow_move_constructible_v<SlotLease>);
}

TEST(SlotLease, KeepsThePoolAliveUntilItIsDropped) {
    auto pool = pool_of(1);
    const std::weak_ptr<SlotPool> watch = pool;
    std::optional<SlotLease> lease(pool->lease(0));
    pool.reset();
    EXPECT_FALSE(watch.expired());
    lease.reset();
    EXPECT_TRUE(watch.expired());
}

TEST(SlotLease, MayBeDroppedOnAnyThread) {
    constexpr int kThreads = 4, kSlotsPerThread = 64;
    const auto pool = pool_of(kThreads * kSlotsPerThread);
    std::vector<std::vector<SlotLease>> leases(kThreads);
    for (int slot = 0; slot < pool->size(); ++slot) leases[slot % kThreads].push_back(pool->lease(slot));

    std::vector<std::thread> threads;
    for (auto& share : leases) threads.emplace_back([&share] { share.clear(); });
    int before = pool->size();
    for (int look = 0; look < 1000; ++look) {
        const int now = pool->in_flight();
        EXPECT_LE(now, before);
        before = now;
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(pool->in_flight(), 0);
    EXPECT_EQ(pool->first_free(), 0);
}

}  // namespace
}  // namespace te_graph::graph
