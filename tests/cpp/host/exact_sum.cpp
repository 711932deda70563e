// The exact sum (exact_sum.h) against 128-bit integers and against long double where that is exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "multi_tensor/exact_sum.h"
#include "seed.h"

namespace te_graph::multi_tensor {
namespace {

struct Sum {
    uint64_t partial[kPartialWords] = {};

    void add(double term) {
        add_exactly(term, [this](int word, uint64_t amount) { partial[word] += amount; });
    }
    double value() const {
        Sum copy = *this;
        return rounded_sum(copy.partial);
    }
};

Sum sum_of(const std::vector<double>& terms) {
    Sum sum;
    for (const double term : terms) sum.add(term);
    return sum;
}

TEST(ExactSum, OneTermComesBackAsItIs) {
    auto generator = seeded_generator();
    for (int i = 0; i < 100000; ++i) {
        const uint64_t bits = generator() >> 1;
        double term;
        std::memcpy(&term, &bits, sizeof(term));
        if (!std::isfinite(term)) continue;
        // Subnormal numbers are whole multiples of the lowest limb's unit, and come back, too.
        ASSERT_EQ(sum_of({term}).value(), term) << bits;
    }
    for (const double term : {0.0, 5e-324, 2.2250738585072014e-308, 1.0, 1.7976931348623157e308}) {
        EXPECT_EQ(sum_of({term}).value(), term);
    }
}

// Reference: integers below 2^120 as terms, added as such; the sum rounded by hand to nearest, ties to even.
double rounded(unsigned __int128 value) {
    int shift = 0;
    while (value >> shift >> 53 != 0) ++shift;
    if (shift == 0) return static_cast<double>(static_cast<uint64_t>(value));
    const auto kept = static_cast<uint64_t>(value >> shift);
    const unsigned __int128 lost = value & ((static_cast<unsigned __int128>(1) << shift) - 1);
    const unsigned __int128 half = static_cast<unsigned __int128>(1) << (shift - 1);
    const bool up = lost > half || (lost == half && kept % 2 == 1);
    return std::ldexp(static_cast<double>(kept + up), shift);
}

TEST(ExactSum, SumsOfIntegersAreRoundedOnceToNearestTiesToEven) {
    auto generator = seeded_generator();
    for (int round = 0; round < 20000; ++round) {
        unsigned __int128 expected = 0;
        Sum sum;
        const int terms = 1 + static_cast<int>(generator() % 20);
        for (int i = 0; i < terms; ++i) {
            const int shift = static_cast<int>(generator() % 64);
            const uint64_t mantissa = generator() >> (11 + generator() % 53);
            expected += static_cast<unsigned __int128>(mantissa) << shift;
            sum.add(std::ldexp(static_cast<double>(mantissa), shift));
        }
        ASSERT_EQ(sum.value(), rounded(expected));
    }
}

TEST(ExactSum, TiesGoToTheEvenNumberAndAnythingMoreGoesUp) {
    const double one = 4503599627370496.0;  // 2^52: the unit in the last place is 1
    EXPECT_EQ(sum_of({one, 0.5}).value(), one);
    EXPECT_EQ(sum_of({one + 1, 0.5}).value(), one + 2);
    EXPECT_EQ(sum_of({one, 0.5, 5e-324}).value(), one + 1);
    EXPECT_EQ(sum_of({one, 0.25, 0.25}).value(), one);
}

TEST(ExactSum, TermsOfAllMagnitudesCountInAnyOrderAndGrouping) {
    auto generator = seeded_generator();
    std::vector<double> terms;
    for (int i = 0; i < 3000; ++i) {
        terms.push_back(
            std::ldexp(static_cast<double>(generator() >> 11), static_cast<int>(generator() % 2000) - 1074));
    }
    const double expected = sum_of(terms).value();
    for (int round = 0; round < 5; ++round) {
        std::shuffle(terms.begin(), terms.end(), generator);
        const auto middle = terms.begin() + static_cast<int64_t>(generator() % terms.size());
        const Sum left = sum_of({terms.begin(), middle}), right = sum_of({middle, terms.end()});
        Sum joined;
        for (int i = 0; i < kPartialWords; ++i) joined.partial[i] = left.partial[i] + right.partial[i];
        ASSERT_EQ(joined.value(), expected);
    }
}

TEST(ExactSum, ManyLargeTermsCarryThroughTheLimbs) {
    Sum sum;
    for (int i = 0; i < 1 << 20; ++i) sum.add(0xFFFFFFFFFFFFFp0);  // all 52 bits set
    EXPECT_EQ(sum.value(), std::ldexp(0xFFFFFFFFFFFFFp0, 20));
}

TEST(ExactSum, InfinityAndNanAreRemembered) {
    const double infinity = std::numeric_limits<double>::infinity();
    EXPECT_EQ(sum_of({1.0, infinity, 2.0}).value(), infinity);
    EXPECT_TRUE(std::isnan(sum_of({1.0, std::nan(""), infinity}).value()));
    // The sum itself may leave the range of fp64.
    EXPECT_EQ(sum_of({1.7976931348623157e308, 1.7976931348623157e308}).value(), infinity);
}

}  // namespace
}  // namespace te_graph::multi_tensor
