// The slot state machine: free -> leased, also several times -> free, on whatever thread a lease is dropped; a slot in
// use keeps the slots of its number in the predecessors busy.
#include "graphs/callables/slot_leases.h"

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

using Leases = std::shared_ptr<SlotLeases>;

// The number of the first slot that is free, or -1.
int first_free(const SlotLeases& slots) {
    for (int slot = 0; slot < slots.size(); ++slot) {
        if (slots.is_free(slot)) return slot;
    }
    return -1;
}

Leases slots_of(int count, Leases predecessor = nullptr) {
    auto slots = std::make_shared<SlotLeases>(std::move(predecessor));
    for (int i = 0; i < count; ++i) slots->add();
    return slots;
}

// Slots of callables of which each is the predecessor of the next.
std::vector<Leases> chain_of(int callables, int count) {
    std::vector<Leases> chain;
    for (int i = 0; i < callables; ++i) chain.push_back(slots_of(count, chain.empty() ? nullptr : chain.back()));
    return chain;
}

std::vector<int> in_flight(const std::vector<Leases>& callables) {
    std::vector<int> counts;
    for (const Leases& slots : callables) counts.push_back(slots->in_flight());
    return counts;
}

TEST(SlotLeases, WithoutSlotsHasNoneFree) {
    const auto slots = slots_of(0);
    EXPECT_EQ(slots->size(), 0);
    EXPECT_EQ(slots->in_flight(), 0);
    EXPECT_EQ(first_free(*slots), -1);
}

TEST(SlotLeases, LendsTheLowestFreeSlotUntilAllAreInFlight) {
    const auto slots = slots_of(3);
    std::vector<SlotLease> leases;
    for (int slot = 0; slot < 3; ++slot) {
        EXPECT_EQ(slots->in_flight(), slot);
        ASSERT_EQ(first_free(*slots), slot);
        leases.push_back(slots->lease(slot));
        EXPECT_EQ(leases.back().slot(), slot);
    }
    EXPECT_EQ(slots->in_flight(), 3);
    EXPECT_EQ(first_free(*slots), -1);
    EXPECT_EQ(slots->size(), 3);
}

TEST(SlotLeases, FirstFreeDoesNotTakeTheSlot) {
    const auto slots = slots_of(2);
    EXPECT_EQ(first_free(*slots), 0);
    EXPECT_EQ(first_free(*slots), 0);
    EXPECT_EQ(slots->in_flight(), 0);
}

TEST(SlotLeases, ASlotAddedWhileAllAreInFlightIsFree) {
    const auto slots = slots_of(1);
    const SlotLease lease = slots->lease(0);
    EXPECT_EQ(first_free(*slots), -1);
    slots->add();
    EXPECT_EQ(first_free(*slots), 1);
    EXPECT_EQ(slots->in_flight(), 1);
}

TEST(SlotLeases, DroppingALeaseFreesItsSlotAndNoOther) {
    const auto slots = slots_of(3);
    const SlotLease first = slots->lease(0);
    std::optional<SlotLease> middle(slots->lease(1));
    const SlotLease last = slots->lease(2);
    middle.reset();
    EXPECT_EQ(slots->in_flight(), 2);
    EXPECT_EQ(first_free(*slots), 1);
    const SlotLease again = slots->lease(1);
    EXPECT_EQ(first_free(*slots), -1);
}

TEST(SlotLeases, ASlotLeasedSeveralTimesIsBusyUntilTheLastLeaseIsDropped) {
    const auto slots = slots_of(2);
    std::vector<SlotLease> leases;
    for (int i = 0; i < 3; ++i) leases.push_back(slots->lease(1));
    while (!leases.empty()) {
        EXPECT_EQ(slots->in_flight(), 1);  // one slot, however often it is leased
        EXPECT_FALSE(slots->is_free(1));
        EXPECT_TRUE(slots->is_free(0));
        leases.pop_back();
    }
    EXPECT_TRUE(slots->is_free(1));
    EXPECT_EQ(slots->in_flight(), 0);
}

TEST(SlotLeases, ASlotInUseKeepsTheSlotOfItsNumberBusyInAllPredecessorsAndInNoSuccessor) {
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

TEST(SlotLeases, ThePredecessorIsHeldByTheFirstLeaseAndLetGoWithTheLast) {
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

TEST(SlotLeases, ALeaseOfThePredecessorOutlivesThatOfTheSuccessor) {
    const auto chain = chain_of(3, 1);
    std::optional<SlotLease> own(chain[0]->lease(0)), last(chain[2]->lease(0));
    last.reset();
    EXPECT_EQ(in_flight(chain), (std::vector{1, 0, 0}));
    own.reset();
    EXPECT_EQ(in_flight(chain), (std::vector{0, 0, 0}));
}

TEST(SlotLeases, APredecessorOfTwoIsBusyUntilNeitherNeedsItsSlot) {
    const auto predecessor = slots_of(1);
    const auto left = slots_of(1, predecessor), right = slots_of(1, predecessor);
    std::optional<SlotLease> one(left->lease(0)), other(right->lease(0));
    one.reset();
    EXPECT_FALSE(predecessor->is_free(0));
    other.reset();
    EXPECT_TRUE(predecessor->is_free(0));
}

TEST(SlotLeases, FollowsAModelThroughRandomLeasesAndReleases) {
    auto generator = seeded_generator();
    const auto slots = slots_of(7);
    std::vector<std::optional<SlotLease>> leases(7);
    std::set<int> free{0, 1, 2, 3, 4, 5, 6};
    for (int step = 0; step < 2000; ++step) {
        ASSERT_EQ(first_free(*slots), free.empty() ? -1 : *free.begin());
        ASSERT_EQ(slots->in_flight(), 7 - static_cast<int>(free.size()));
        const int slot = static_cast<int>(generator() % 7);
        if (leases[slot]) {
            leases[slot].reset();
            free.insert(slot);
        } else if (!free.empty()) {
            const int lowest = first_free(*slots);
            leases[lowest].emplace(slots->lease(lowest));
            free.erase(lowest);
        }
    }
}

TEST(SlotLeases, AChainFollowsAModelThroughRandomLeasesAndReleases) {
    constexpr int kPools = 4, kSlots = 5;
    auto generator = seeded_generator();
    const auto chain = chain_of(kPools, kSlots);
    struct Taken {
        int slots;
        std::unique_ptr<SlotLease> lease;
    };
    std::vector<Taken> taken;
    // A slot is busy while a lease on it, or on that number of a later callable, lives.
    const auto is_free = [&](int slots, int slot) {
        return std::none_of(taken.begin(), taken.end(),
                            [&](const Taken& one) { return one.slots >= slots && one.lease->slot() == slot; });
    };
    for (int step = 0; step < 4000; ++step) {
        if (taken.empty() || (taken.size() < 12 && generator() % 2)) {
            const int slots = static_cast<int>(generator() % kPools), slot = static_cast<int>(generator() % kSlots);
            taken.push_back({slots, std::make_unique<SlotLease>(chain[slots]->lease(slot))});
        } else {
            taken.erase(taken.begin() + static_cast<int64_t>(generator() % taken.size()));
        }
        for (int slots = 0; slots < kPools; ++slots) {
            int busy = 0, first = -1;
            for (int slot = kSlots - 1; slot >= 0; --slot) {
                ASSERT_EQ(chain[slots]->is_free(slot), is_free(slots, slot)) << "slots " << slots << ", slot " << slot;
                busy += !is_free(slots, slot);
                if (is_free(slots, slot)) first = slot;
            }
            ASSERT_EQ(chain[slots]->in_flight(), busy);
            ASSERT_EQ(first_free(*chain[slots]), first);
        }
    }
}

TEST(SlotLease, OnlyTheOneMovedToFreesTheSlot) {
    const auto slots = slots_of(1);
    std::unique_ptr<SlotLease> target;
    {
        SlotLease source = slots->lease(0);
        target = std::make_unique<SlotLease>(std::move(source));
        EXPECT_EQ(target->slot(), 0);
    }
    EXPECT_EQ(slots->in_flight(), 1);  // the moved-from lease is gone and has freed nothing
    target.reset();
    EXPECT_EQ(slots->in_flight(), 0);
}

TEST(SlotLease, CannotBeCopiedOrAssigned) {
    EXPECT_FALSE(std::is_copy_constructible_v<SlotLease>);
    EXPECT_FALSE(std::is_copy_assignable_v<SlotLease>);
    EXPECT_FALSE(std::is_move_assignable_v<SlotLease>);
    EXPECT_TRUE(std::is_nothrow_move_constructible_v<SlotLease>);
}

TEST(SlotLease, KeepsThePoolAliveUntilItIsDropped) {
    auto slots = slots_of(1);
    const std::weak_ptr<SlotLeases> watch = slots;
    std::optional<SlotLease> lease(slots->lease(0));
    slots.reset();
    EXPECT_FALSE(watch.expired());
    lease.reset();
    EXPECT_TRUE(watch.expired());
}

TEST(SlotLease, KeepsThePredecessorsAliveUntilItIsDropped) {
    auto chain = chain_of(3, 1);
    const std::weak_ptr<SlotLeases> watch = chain[0];
    std::optional<SlotLease> lease(chain[2]->lease(0));
    chain.clear();
    ASSERT_FALSE(watch.expired());
    EXPECT_EQ(watch.lock()->in_flight(), 1);
    lease.reset();
    EXPECT_TRUE(watch.expired());
}

TEST(SlotLease, MayBeDroppedOnAnyThread) {
    constexpr int kThreads = 4, kSlotsPerThread = 64;
    const auto slots = slots_of(kThreads * kSlotsPerThread);
    std::vector<std::vector<SlotLease>> leases(kThreads);
    for (int slot = 0; slot < slots->size(); ++slot) leases[slot % kThreads].push_back(slots->lease(slot));

    std::vector<std::thread> threads;
    for (auto& share : leases) threads.emplace_back([&share] { share.clear(); });
    int before = slots->size();
    for (int look = 0; look < 1000; ++look) {
        const int now = slots->in_flight();
        EXPECT_LE(now, before);
        before = now;
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(slots->in_flight(), 0);
    EXPECT_EQ(first_free(*slots), 0);
}

TEST(SlotLease, MayBeDroppedOnAnyThreadWhenPoolsAreChained) {
    constexpr int kThreads = 4, kSlots = 64, kLeasesPerSlot = 3;
    const auto chain = chain_of(3, kSlots);
    std::vector<std::vector<SlotLease>> shares(kThreads);
    for (int i = 0; i < kSlots * kLeasesPerSlot; ++i) {
        for (const Leases& slots : chain) shares[(i / kSlots + i) % kThreads].push_back(slots->lease(i % kSlots));
    }
    std::vector<std::thread> threads;
    for (auto& share : shares) threads.emplace_back([&share] { share.clear(); });
    std::vector<int> before(3, kSlots);
    for (int look = 0; look < 1000; ++look) {
        const auto now = in_flight(chain);
        for (int slots = 0; slots < 3; ++slots) EXPECT_LE(now[slots], before[slots]);
        // Looked at from the front: what a later callable still uses was in use in front of it.
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
                const auto slots = static_cast<int>(generator() % 3), slot = static_cast<int>(generator() % kSlots);
                const SlotLease lease = chain[slots]->lease(slot);
                for (int below = 0; below <= slots; ++below) wrong += chain[below]->is_free(slot);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(in_flight(chain), (std::vector{1, 1, 0}));
}

}  // namespace
}  // namespace te_graph::graphs
