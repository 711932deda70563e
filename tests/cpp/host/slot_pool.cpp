// The slot state machine: free -> leased, also several times -> free, on whatever thread a lease is dropped; a slot in
// use keeps the slots of its number in the predecessors busy.
#include "graphs/callables/slot_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <type_traits>
#include <vector>

#include "seed.h"

namespace te_graph::graphs {
namespace {

using Pool = std::shared_ptr<SlotPool>;

// The number of the first slot that is free, or -1.
int first_free(const SlotPool& pool) {
    for (int slot = 0; slot < pool.size(); ++slot) {
        if (pool.is_free(slot)) return slot;
    }
    return -1;
}

Pool pool_of(int slots, Pool predecessor = nullptr) {
    auto pool = std::make_shared<SlotPool>(std::move(predecessor));
    for (int i = 0; i < slots; ++i) pool->add();
    return pool;
}

// Pools of which each is the predecessor of the next.
std::vector<Pool> chain_of(int pools, int slots) {
    std::vector<Pool> chain;
    for (int i = 0; i < pools; ++i) chain.push_back(pool_of(slots, chain.empty() ? nullptr : chain.back()));
    return chain;
}

std::vector<int> in_flight(const std::vector<Pool>& pools) {
    std::vector<int> counts;
    for (const Pool& pool : pools) counts.push_back(pool->in_flight());
    return counts;
}

TEST(SlotPool, WithoutSlotsHasNoneFree) {
    const auto pool = pool_of(0);
    EXPECT_EQ(pool->size(), 0);
    EXPECT_EQ(pool->in_flight(), 0);
    EXPECT_EQ(first_free(*pool), -1);
}

TEST(SlotPool, LendsTheLowestFreeSlotUntilAllAreInFlight) {
    const auto pool = pool_of(3);
    std::vector<SlotLease> leases;
    for (int slot = 0; slot < 3; ++slot) {
        EXPECT_EQ(pool->in_flight(), slot);
        ASSERT_EQ(first_free(*pool), slot);
        leases.push_back(pool->lease(slot));
        EXPECT_EQ(leases.back().slot(), slot);
    }
    EXPECT_EQ(pool->in_flight(), 3);
    EXPECT_EQ(first_free(*pool), -1);
    EXPECT_EQ(pool->size(), 3);
}

TEST(SlotPool, FirstFreeDoesNotTakeTheSlot) {
    const auto pool = pool_of(2);
    EXPECT_EQ(first_free(*pool), 0);
    EXPECT_EQ(first_free(*pool), 0);
    EXPECT_EQ(pool->in_flight(), 0);
}

TEST(SlotPool, ASlotAddedWhileAllAreInFlightIsFree) {
    const auto pool = pool_of(1);
    const SlotLease lease = pool->lease(0);
    EXPECT_EQ(first_free(*pool), -1);
    pool->add();
    EXPECT_EQ(first_free(*pool), 1);
    EXPECT_EQ(pool->in_flight(), 1);
}

TEST(SlotPool, DroppingALeaseFreesItsSlotAndNoOther) {
    const auto pool = pool_of(3);
    const SlotLease first = pool->lease(0);
    std::optional<SlotLease> middle(pool->lease(1));
    const SlotLease last = pool->lease(2);
    middle.reset();
    EXPECT_EQ(pool->in_flight(), 2);
    EXPECT_EQ(first_free(*pool), 1);
    const SlotLease again = pool->lease(1);
    EXPECT_EQ(first_free(*pool), -1);
}

TEST(SlotPool, ASlotLeasedSeveralTimesIsBusyUntilTheLastLeaseIsDropped) {
    const auto pool = pool_of(2);
    std::vector<SlotLease> leases;
    for (int i = 0; i < 3; ++i) leases.push_back(pool->lease(1));
    while (!leases.empty()) {
        EXPECT_EQ(pool->in_flight(), 1);  // one slot, however often it is leased
        EXPECT_FALSE(pool->is_free(1));
        EXPECT_TRUE(pool->is_free(0));
        leases.pop_back();
    }
    EXPECT_TRUE(pool->is_free(1));
    EXPECT_EQ(pool->in_flight(), 0);
}

TEST(SlotPool, ASlotInUseKeepsTheSlotOfItsNumberBusyInAllPredecessorsAndInNoSuccessor) {
    const auto chain = chain_of(3, 2);
    std::optional<SlotLease> middle(chain[1]->lease(1));
    EXPECT_EQ(in_flight(chain), (std::vector{1, 1, 0}));
    EXPECT_FALSE(chain[0]->is_free(1));
    EXPECT_EQ(first_free(*chain[0]), 0);
    EXPECT_EQ(first_free(*chain[2]), 0);
    std::optional<SlotLease> last(chain[2]->lease(0));
    EXPECT_EQ(in_flight(chain), (std::vector{2, 2, 1}));
    EXPECT_EQ(first_free(*chain[0]), -1);
    middle.reset();
    EXPECT_EQ(in_flight(chain), (std::vector{1, 1, 1}));
    EXPECT_TRUE(chain[0]->is_free(1));
    last.reset();
    EXPECT_EQ(in_flight(chain), (std::vector{0, 0, 0}));
}

TEST(SlotPool, ThePredecessorIsHeldByTheFirstLeaseAndLetGoWithTheLast) {
    const auto chain = chain_of(2, 1);
    std::optional<SlotLease> first(chain[1]->lease(0)), second(chain[1]->lease(0)), own(chain[0]->lease(0));
    first.reset();
    own.reset();
    EXPECT_EQ(in_flight(chain), (std::vector{1, 1}));  // for the sake of the second lease of the successor
    second.reset();
    EXPECT_EQ(in_flight(chain), (std::vector{0, 0}));
    first.emplace(chain[1]->lease(0));  // and again
    EXPECT_EQ(in_flight(chain), (std::vector{1, 1}));
}

TEST(SlotPool, ALeaseOfThePredecessorOutlivesThatOfTheSuccessor) {
    const auto chain = chain_of(3, 1);
    std::optional<SlotLease> own(chain[0]->lease(0)), last(chain[2]->lease(0));
    last.reset();
    EXPECT_EQ(in_flight(chain), (std::vector{1, 0, 0}));
    own.reset();
    EXPECT_EQ(in_flight(chain), (std::vector{0, 0, 0}));
}

TEST(SlotPool, APredecessorOfTwoIsBusyUntilNeitherNeedsItsSlot) {
    const auto predecessor = pool_of(1);
    const auto left = pool_of(1, predecessor), right = pool_of(1, predecessor);
    std::optional<SlotLease> one(left->lease(0)), other(right->lease(0));
    one.reset();
    EXPECT_FALSE(predecessor->is_free(0));
    other.reset();
    EXPECT_TRUE(predecessor->is_free(0));
}

TEST(SlotPool, FollowsAModelThroughRandomLeasesAndReleases) {
    auto generator = seeded_generator();
    const auto pool = pool_of(7);
    std::vector<std::optional<SlotLease>> leases(7);
    std::set<int> free{0, 1, 2, 3, 4, 5, 6};
    for (int step = 0; step < 2000; ++step) {
        ASSERT_EQ(first_free(*pool), free.empty() ? -1 : *free.begin());
        ASSERT_EQ(pool->in_flight(), 7 - static_cast<int>(free.size()));
        const int slot = static_cast<int>(generator() % 7);
        if (leases[slot]) {
            leases[slot].reset();
            free.insert(slot);
        } else if (!free.empty()) {
            const int lowest = first_free(*pool);
            leases[lowest].emplace(pool->lease(lowest));
            free.erase(lowest);
        }
    }
}

TEST(SlotPool, AChainFollowsAModelThroughRandomLeasesAndReleases) {
    constexpr int kPools = 4, kSlots = 5;
    auto generator = seeded_generator();
    const auto chain = chain_of(kPools, kSlots);
    struct Taken {
        int pool;
        std::unique_ptr<SlotLease> lease;
    };
    std::vector<Taken> taken;
    // A slot is busy while a lease on it, or on that number in a later pool, lives.
    const auto is_free = [&](int pool, int slot) {
        return std::none_of(taken.begin(), taken.end(),
                            [&](const Taken& one) { return one.pool >= pool && one.lease->slot() == slot; });
    };
    for (int step = 0; step < 4000; ++step) {
        if (taken.empty() || (taken.size() < 12 && generator() % 2)) {
            const int pool = static_cast<int>(generator() % kPools), slot = static_cast<int>(generator() % kSlots);
            taken.push_back({pool, std::make_unique<SlotLease>(chain[pool]->lease(slot))});
        } else {
            taken.erase(taken.begin() + static_cast<int64_t>(generator() % taken.size()));
        }
        for (int pool = 0; pool < kPools; ++pool) {
            int busy = 0, first = -1;
            for (int slot = kSlots - 1; slot >= 0; --slot) {
                ASSERT_EQ(chain[pool]->is_free(slot), is_free(pool, slot)) << "pool " << pool << ", slot " << slot;
                busy += !is_free(pool, slot);
                if (is_free(pool, slot)) first = slot;
            }
            ASSERT_EQ(chain[pool]->in_flight(), busy);
            ASSERT_EQ(first_free(*chain[pool]), first);
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

TEST(SlotLease, KeepsThePredecessorsAliveUntilItIsDropped) {
    auto chain = chain_of(3, 1);
    const std::weak_ptr<SlotPool> watch = chain[0];
    std::optional<SlotLease> lease(chain[2]->lease(0));
    chain.clear();
    ASSERT_FALSE(watch.expired());
    EXPECT_EQ(watch.lock()->in_flight(), 1);
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
    EXPECT_EQ(first_free(*pool), 0);
}

TEST(SlotLease, MayBeDroppedOnAnyThreadWhenPoolsAreChained) {
    constexpr int kThreads = 4, kSlots = 64, kLeasesPerSlot = 3;
    const auto chain = chain_of(3, kSlots);
    std::vector<std::vector<SlotLease>> shares(kThreads);
    for (int i = 0; i < kSlots * kLeasesPerSlot; ++i) {
        for (const Pool& pool : chain) shares[(i / kSlots + i) % kThreads].push_back(pool->lease(i % kSlots));
    }
    std::vector<std::thread> threads;
    for (auto& share : shares) threads.emplace_back([&share] { share.clear(); });
    std::vector<int> before(3, kSlots);
    for (int look = 0; look < 1000; ++look) {
        const auto now = in_flight(chain);
        for (int pool = 0; pool < 3; ++pool) EXPECT_LE(now[pool], before[pool]);
        // Looked at from the front: what a later pool still uses was in use in front of it.
        EXPECT_GE(now[0], now[1]);
        EXPECT_GE(now[1], now[2]);
        before = now;
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(in_flight(chain), (std::vector{0, 0, 0}));
}

TEST(SlotLease, MayBeTakenAndDroppedByManyThreadsOnAllPoolsOfAChainAtOnce) {
    constexpr int kThreads = 4, kSlots = 3, kRounds = 3000;
    const auto chain = chain_of(3, kSlots);
    const SlotLease held = chain[1]->lease(2);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&, thread] {
            std::mt19937_64 generator(thread);
            for (int round = 0; round < kRounds; ++round) {
                const auto pool = static_cast<int>(generator() % 3), slot = static_cast<int>(generator() % kSlots);
                const SlotLease lease = chain[pool]->lease(slot);
                for (int below = 0; below <= pool; ++below) wrong += chain[below]->is_free(slot);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(in_flight(chain), (std::vector{1, 1, 0}));
}

}  // namespace
}  // namespace te_graph::graphs
