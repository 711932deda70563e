// Which buckets are complete, against a count of all that is still to come.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "flat/ready_buckets.h"
#include "seed.h"

namespace te_graph::flat {
namespace {

// Takes all buckets that are complete.
std::vector<size_t> taken(ReadyBuckets& buckets) {
    std::vector<size_t> result;
    for (size_t bucket = 0; buckets.take_next(bucket);) result.push_back(bucket);
    return result;
}

void begin(ReadyBuckets& buckets) {
    buckets.begin();
    buckets.look_early();
}

TEST(ReadyBuckets, TellsNothingBeforeItHasLearnt) {
    ReadyBuckets buckets({1, 1});
    begin(buckets);
    EXPECT_FALSE(buckets.looks_early());
    buckets.note_accumulated(0);
    EXPECT_TRUE(taken(buckets).empty());
    EXPECT_EQ(buckets.end(true), 0u);
}

TEST(ReadyBuckets, TellsBucketsInTheirOrder) {
    ReadyBuckets buckets({1, 2});
    for (int repetition = 0; repetition < 2; ++repetition) {
        begin(buckets);
        buckets.note_accumulated(2);
        buckets.note_accumulated(1);
        EXPECT_TRUE(taken(buckets).empty());  // the first one is missing
        EXPECT_TRUE(buckets.may_write(0));
        buckets.note_accumulated(0);
        EXPECT_EQ(taken(buckets), repetition == 0 ? std::vector<size_t>{} : (std::vector<size_t>{0, 1}));
        EXPECT_EQ(buckets.may_write(1), repetition == 0);
        EXPECT_EQ(buckets.end(true), repetition == 0 ? 0u : 2u);
    }
}

TEST(ReadyBuckets, StopsWhereSomethingElseAccumulates) {
    ReadyBuckets buckets({1, 1});
    begin(buckets);
    for (size_t gradient : {0, 1}) buckets.note_accumulated(gradient);
    buckets.end(true);
    begin(buckets);
    buckets.note_accumulated(0);
    EXPECT_EQ(taken(buckets), std::vector<size_t>{0});
    buckets.stop();
    buckets.note_accumulated(1);
    EXPECT_TRUE(taken(buckets).empty());
    EXPECT_FALSE(buckets.may_write(0));  // it is being reduced all the same
    EXPECT_EQ(buckets.end(true), 1u);
}

TEST(ReadyBuckets, WaitsForWhatHasNeverCome) {
    ReadyBuckets buckets({1, 2, 1});
    for (int repetition = 0; repetition < 2; ++repetition) {
        begin(buckets);
        for (size_t gradient : {0, 1, 3}) buckets.note_accumulated(gradient);
        EXPECT_EQ(taken(buckets), repetition == 0 ? std::vector<size_t>{} : std::vector<size_t>{0});
        EXPECT_TRUE(buckets.may_write(2));
        buckets.end(true);
    }
    begin(buckets);
    for (size_t gradient : {0, 1, 2, 3}) buckets.note_accumulated(gradient);
    EXPECT_EQ(taken(buckets), std::vector<size_t>{0});
    EXPECT_EQ(buckets.end(true), 1u);
    begin(buckets);
    for (size_t gradient : {0, 1, 2, 3}) buckets.note_accumulated(gradient);
    EXPECT_EQ(taken(buckets), (std::vector<size_t>{0, 1, 2}));
}

TEST(ReadyBuckets, RandomBackwards) {
    std::mt19937_64 generator = seeded_generator();
    const auto draw = [&](int below) { return std::uniform_int_distribution(0, below - 1)(generator); };
    for (int program = 0; program < 200; ++program) {
        std::vector<size_t> sizes(1 + draw(4)), bucket_of;
        for (size_t bucket = 0; bucket < sizes.size(); ++bucket) {
            sizes[bucket] = 1 + draw(4);
            bucket_of.insert(bucket_of.end(), sizes[bucket], bucket);
        }
        std::vector<int> most(bucket_of.size());
        ReadyBuckets buckets(sizes);
        for (int backward = 0; backward < 6; ++backward) {
            std::vector<size_t> order;
            for (size_t i = 0; i < most.size(); ++i) {
                const int uses = backward == 0 ? draw(3) : most[i] == 0 ? draw(2) : draw(most[i] + 1);
                order.insert(order.end(), uses, i);
            }
            std::shuffle(order.begin(), order.end(), generator);
            begin(buckets);
            std::vector<int> left = most;
            size_t told = 0;
            for (const size_t gradient : order) {
                EXPECT_TRUE(buckets.may_write(gradient));
                buckets.note_accumulated(gradient);
                --left[gradient];
                for (const size_t bucket : taken(buckets)) {
                    EXPECT_EQ(bucket, told++);
                    for (size_t i = 0; i < left.size(); ++i) {
                        EXPECT_TRUE(bucket_of[i] != bucket || (most[i] > 0 && left[i] == 0));
                    }
                }
                EXPECT_TRUE(backward > 0 || told == 0);
            }
            EXPECT_EQ(buckets.end(true), told);
            for (size_t i = 0; i < most.size(); ++i) {
                most[i] = std::max(most[i], static_cast<int>(std::count(order.begin(), order.end(), i)));
            }
        }
    }
}

}  // namespace
}  // namespace te_graph::flat
