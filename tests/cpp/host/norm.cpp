// The CPU norms: the order in which a chunk is summed, and the value against double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "multi_tensor/norm.h"
#include "multi_tensor/scale.h"
#include "seed.h"

namespace te_graph::multi_tensor {
namespace {

TableEntry entry_of(std::vector<float>& values) {
    return {nullptr, values.data(), static_cast<int64_t>(values.size()), DType::kFloat32, DType::kFloat32, Mode::kAdd,
            {}};
}

std::vector<float> random_values(int64_t count, std::mt19937_64& generator) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(generator);
    return values;
}

// Reference: the order of norm.h written down as a recursion over lane numbers.
float lanes_below(const std::vector<float>& lanes, const std::vector<int>& numbers) {
    if (numbers.size() == 1) return lanes[numbers[0]];
    // The first half of the list against the second one.
    const auto middle = numbers.begin() + static_cast<int64_t>(numbers.size() / 2);
    return lanes_below(lanes, {numbers.begin(), middle}) + lanes_below(lanes, {middle, numbers.end()});
}

float sum_of_squares(const float* values, int64_t count) {
    std::vector<float> lanes(1024);
    for (int64_t i = 0; i < count; ++i) lanes[i % 1024] += values[i] * values[i];
    std::vector<float> threads(256);
    for (int t = 0; t < 256; ++t) {
        std::vector<int> own(4);
        for (int k = 0; k < 4; ++k) own[k] = 4 * t + k;
        threads[t] = lanes_below(lanes, own);
    }
    // Pairs at distance n / 2, then n / 4, ...: neighbours last, which is a recursion over bit-reversed numbers.
    const auto folded = [](std::vector<float> sums) {
        for (size_t n = sums.size() / 2; n > 0; n /= 2) {
            for (size_t i = 0; i < n; ++i) sums[i] = sums[i] + sums[i + n];
        }
        return sums[0];
    };
    std::vector<float> warps;
    for (int w = 0; w < 8; ++w) warps.push_back(folded({threads.begin() + 32 * w, threads.begin() + 32 * (w + 1)}));
    return folded(warps);
}

TEST(NormCpu, AChunkIsSummedInTheOrderThatIsWrittenDown) {
    auto generator = seeded_generator();
    for (const int64_t count : {1, 3, 4, 1023, 1024, 1025, 2049, 5000, 8191, 8192}) {
        std::vector<float> values = random_values(count, generator);
        const TableEntry entry = entry_of(values);
        double norm = 0;
        uint64_t partial[kPartialWords] = {};
        norm_cpu({&entry, 1}, 2, partial, {&norm, true});
        EXPECT_EQ(norm, std::sqrt(static_cast<double>(sum_of_squares(values.data(), count)))) << count;
    }
}

TEST(NormCpu, ANormIsThatOfDoublePrecisionAndClearsItsPartial) {
    auto generator = seeded_generator();
    std::vector<float> a = random_values(20001, generator), b = random_values(3, generator), none;
    const std::vector<TableEntry> entries{entry_of(a), entry_of(none), entry_of(b)};
    for (const double p : {0.0, 0.5, 1.0, 2.0, 3.0, HUGE_VAL}) {
        double expected = 0;
        for (const auto* values : {&a, &b}) {
            for (const double x : *values) {
                expected = std::isinf(p) ? std::max(expected, std::fabs(x))
                                         : expected + (p == 0 ? (x != 0) : std::pow(std::fabs(x), p));
            }
        }
        if (p != 0 && !std::isinf(p)) expected = std::pow(expected, 1 / p);
        float norm = 0;
        uint64_t partial[kPartialWords] = {};
        norm_cpu({entries.data(), 3}, p, partial, {&norm, false});
        EXPECT_NEAR(norm / expected, 1, 1e-6) << p;
        for (const uint64_t word : partial) EXPECT_EQ(word, 0u);

        // The list in two partials that are joined, or each entry alone.
        float parts = 0;
        uint64_t second[kPartialWords] = {};
        norm_cpu({entries.data(), 2}, p, partial, {});
        norm_cpu({entries.data() + 2, 1}, p, second, {});
        for (int i = 0; i < kPartialWords; ++i) {
            partial[i] = std::isinf(p) ? std::max(partial[i], second[i]) : partial[i] + second[i];
        }
        finish_norm_cpu(partial, p, {&parts, false});
        EXPECT_EQ(parts, norm) << p;
    }
}

TEST(NormCpu, NanAndInfinityPropagate) {
    for (const double p : {0.5, 1.0, 2.0, 3.0, HUGE_VAL}) {
        std::vector<float> values(9000, 1.0f);
        const TableEntry entry = entry_of(values);
        float norm = 0;
        uint64_t partial[kPartialWords] = {};
        values[8500] = -INFINITY;
        norm_cpu({&entry, 1}, p, partial, {&norm, false});
        EXPECT_EQ(norm, INFINITY) << p;
        values[3] = NAN;
        norm_cpu({&entry, 1}, p, partial, {&norm, false});
        EXPECT_TRUE(std::isnan(norm)) << p;
    }
}

TEST(NormCpu, MinusZeroIsNotTheLargest) {
    std::vector<float> values{-0.0f, -0.0f};
    const TableEntry entry = entry_of(values);
    float norm = 1;
    uint64_t partial[kPartialWords] = {};
    norm_cpu({&entry, 1}, HUGE_VAL, partial, {&norm, false});
    EXPECT_EQ(norm, 0.0f);
    EXPECT_FALSE(std::signbit(norm));
}

TEST(ScaleCpu, AClipThatHasNothingToDoWritesNothing) {
    std::vector<float> values{1.0f, -0.0f, 3.0f};
    const TableEntry entry = entry_of(values);
    const float norm = 1.0f;
    scale_cpu({&entry, 1}, {.scale = {.data = &norm}, .is_clip = true, .max_norm = 2, .eps = 1e-6});
    EXPECT_EQ(values, (std::vector<float>{1.0f, -0.0f, 3.0f}));
    EXPECT_TRUE(std::signbit(values[1]));
    scale_cpu({&entry, 1}, {.scale = {.data = &norm}, .is_clip = true, .max_norm = 0.5, .eps = 0});
    EXPECT_EQ(values, (std::vector<float>{0.5f, -0.0f, 1.5f}));
}

TEST(ScaleCpu, FoundInfIsSetByANormThatIsNotFiniteAndStopsTheClip) {
    for (const float norm : {INFINITY, NAN, 1.0f}) {
        for (const float before : {0.0f, 1.0f}) {
            std::vector<float> values{4.0f};
            const TableEntry entry = entry_of(values);
            float found_inf = before;
            scale_cpu({&entry, 1},
                      {.scale = {.data = &norm}, .is_clip = true, .max_norm = 0.5, .found_inf = &found_inf});
            const bool clips = norm == 1.0f && before == 0;
            EXPECT_EQ(found_inf, clips ? 0.0f : 1.0f);
            EXPECT_EQ(values[0], clips ? 2.0f : 4.0f);
        }
    }
}

}  // namespace
}  // namespace te_graph::multi_tensor
