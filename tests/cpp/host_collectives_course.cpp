// Lines that warps take (course.h): each of them is done once, in whatever order warps come.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "collectives/course.h"
#include "seed.h"

namespace te_graph::collectives {
namespace {

TEST(Course, EachLineIsTakenOnceAndTheLastNumberIsKnown) {
    auto generator = seeded_generator();
    for (int round = 0; round < 1000; ++round) {
        const int warps = static_cast<int>(1 + generator() % 100), step = warps * kLinesPerWarp;
        const int lines = (kManyTurns - 1) * step + static_cast<int>(1 + generator() % (4 * step));
        std::vector<int> times(lines);
        const auto do_four = [&](int line) {
            for (int i = line; i < std::min(line + kLinesPerWarp, lines); ++i) ++times[i];
        };
        for (int turn = 0; turn < kOwnTurns; ++turn) {
            for (int warp = 0; warp < warps; ++warp) do_four(turn * step + warp * kLinesPerWarp);
        }
        std::vector<int> takers(warps);
        std::iota(takers.begin(), takers.end(), 0);
        int count = 0;
        for (int number = 0; !takers.empty(); ++number) {
            ASSERT_EQ(number, count) << "taken behind the last number";
            const auto taker = takers.begin() + static_cast<int64_t>(generator() % takers.size());
            const int line = taken_line(count++, step);
            if (line < lines) {
                do_four(line);
                continue;
            }
            takers.erase(taker);
            if (number == last_number(lines, step)) count = 0;
            ASSERT_EQ(count == 0, takers.empty()) << lines << " lines, " << warps << " warps, number " << number;
        }
        ASSERT_EQ(count, 0);
        ASSERT_EQ(std::count(times.begin(), times.end(), 1), lines) << lines << " lines, " << warps << " warps";
    }
}

TEST(Course, BlocksHaveEnoughThreadsForTheTurnsAndWarpsThatTakeHaveTurnsOfTheirOwn) {
    auto generator = seeded_generator();
    for (int round = 0; round < 100000; ++round) {
        const int blocks = 1 << generator() % 8, most = generator() % 2 == 0 ? 512 : 1024;
        const auto lines = static_cast<int64_t>(1 + generator() % (1ull << generator() % 30));
        const int64_t of_turn = int64_t{blocks} * most / 8, turns = (lines + of_turn - 1) / of_turn;
        const int threads = threads_for(lines, blocks, turns);
        const int64_t step = int64_t{blocks} * threads / 8;
        ASSERT_TRUE(threads > 0 && threads <= most && threads % 32 == 0) << threads;
        ASSERT_GE(step * turns, lines);
        ASSERT_LT((threads - 32) / 32 * turns * blocks * kLinesPerWarp, lines) << "a warp of each block has nothing";
        ASSERT_TRUE(turns < kManyTurns || lines > kOwnTurns * step);
        // What is taken in vain by all warps fits into 32 bits, too.
        ASSERT_LT(lines + step + kLinesPerWarp, int64_t{1} << 31);
    }
}

}  // namespace
}  // namespace te_graph::collectives
