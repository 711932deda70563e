// Ranges of a pool against a map of bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "collectives/range_allocator.h"
#include "seed.h"

namespace te_graph::collectives {
namespace {

TEST(RangeAllocator, AllocatesFreeRangesAndMergesFreedOnes) {
    constexpr int64_t kBegin = 4096, kUnits = 200, kUnit = RangeAllocator::kAlignment;
    auto generator = seeded_generator();
    RangeAllocator ranges(kBegin, kBegin + kUnits * kUnit);
    std::vector<bool> taken(kUnits);
    struct Range {
        int64_t offset, bytes;
    };
    std::vector<Range> held;
    const auto mark = [&](const Range& range, bool value) {
        for (int64_t i = 0; i < (range.bytes + kUnit - 1) / kUnit; ++i) {
            const int64_t unit = (range.offset - kBegin) / kUnit + i;
            ASSERT_NE(taken.at(unit), value);
            taken.at(unit) = value;
        }
    };
    for (int i = 0; i < 20000; ++i) {
        if (!held.empty() && generator() % 2 == 0) {
            std::swap(held[generator() % held.size()], held.back());
            mark(held.back(), false);
            ranges.free(held.back().offset, held.back().bytes);
            held.pop_back();
        } else {
            const auto bytes = static_cast<int64_t>(1 + generator() % (20 * kUnit));
            const int64_t offset = ranges.allocate(bytes);
            if (offset < 0) {
                // There is no run of free units that is long enough.
                int64_t run = 0, longest = 0;
                for (const bool is_taken : taken) longest = std::max(longest, run = is_taken ? 0 : run + 1);
                ASSERT_LT(longest * kUnit, bytes);
                continue;
            }
            ASSERT_EQ(offset % kUnit, 0);
            held.push_back({offset, bytes});
            mark(held.back(), true);
        }
        if (HasFatalFailure()) return;
        ASSERT_EQ(ranges.free_bytes(), std::count(taken.begin(), taken.end(), false) * kUnit);
    }
    for (const Range& range : held) ranges.free(range.offset, range.bytes);
    EXPECT_EQ(ranges.allocate(kUnits * kUnit), kBegin);
    EXPECT_EQ(ranges.allocate(1), -1);
}

}  // namespace
}  // namespace te_graph::collectives
