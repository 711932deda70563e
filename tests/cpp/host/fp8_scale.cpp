// Scales on the CPU: delayed scaling on histories written down by hand, and the rules of scales against double
// precision.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "fp8/scale.h"
#include "multi_tensor/table.h"
#include "seed.h"

namespace te_graph::fp8 {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = INFINITY;
constexpr float kLargest = 448;
using Column = std::vector<float>;

// Equal, where a NaN equals a NaN.
void expect_equal(const Column& actual, const Column& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_TRUE(actual[i] == expected[i] || (std::isnan(actual[i]) && std::isnan(expected[i])))
            << "element " << i << ": expected " << expected[i] << ", got " << actual[i];
    }
}

// The update of one column.
struct OneColumn {
    Column history;
    float scale = 2, scale_inv = 0;

    void update(bool most_recent = false, bool skip_nonfinite = false, float scaled_max = kLargest) {
        amax_and_scale_update_cpu({.history = history.data(),
                                   .row_stride = 1,
                                   .column_stride = 1,
                                   .height = static_cast<int>(history.size()),
                                   .columns = 1,
                                   .scale = {&scale, 1},
                                   .scale_inv = {&scale_inv, 1},
                                   .mask = {},
                                   .flag = {},
                                   .update_weight_scale_inv = false,
                                   .scaled_max = scaled_max,
                                   .most_recent = most_recent,
                                   .skip_nonfinite = skip_nonfinite});
    }
};

TEST(Fp8UpdateCpu, EdgeCasesOfAHistoryGiveTheScaleAndTheHistoryThatAreWrittenDown) {
    // Division in double precision, rounded to fp32, is correctly rounded.
    const auto scale_for = [](float amax) { return static_cast<float>(static_cast<double>(kLargest) / amax); };
    constexpr float kBefore = 2, kTiny = 1e-45f, kOverflows = kLargest / FLT_MAX / 2;
    struct Case {
        const char* name;
        Column before, after;
        float of_maximum, of_newest;
    };
    const Case cases[] = {
        {"all 0", {0, 0, 0, 0}, {0, 0, 0, 0}, kBefore, kBefore},
        {"did not run", {0, 1, 2, 3}, {0, 1, 2, 3}, kBefore, kBefore},
        {"did not run, with a NaN", {0, 1, kNan, 3}, {0, 1, kNan, 3}, kBefore, kBefore},
        {"numbers", {1, 7, 2, 3}, {0, 2, 3, 1}, 64, 448},
        {"NaN in row 0", {kNan, 1, 2, 3}, {0, 2, 3, kNan}, scale_for(3), kBefore},
        {"nothing but NaNs", {kNan, kNan, kNan, kNan}, {0, kNan, kNan, kNan}, kBefore, kBefore},
        {"NaN in the middle", {1, 2, kNan, 3}, {0, kNan, 3, 1}, scale_for(3), 448},
        {"Inf in row 0", {kInfinity, 1, 2, 3}, {0, 2, 3, kInfinity}, kBefore, kBefore},
        {"Inf in the middle", {1, 2, kInfinity, 3}, {0, kInfinity, 3, 1}, kBefore, 448},
        {"denormal", {kTiny, 0, 0, 0}, {0, 0, 0, kTiny}, FLT_MAX, FLT_MAX},
        {"FLT_MAX", {FLT_MAX, 1, 2, 3}, {0, 2, 3, FLT_MAX}, scale_for(FLT_MAX), scale_for(FLT_MAX)},
        {"quotient overflows", {kOverflows, 0, 0, 0}, {0, 0, 0, kOverflows}, FLT_MAX, FLT_MAX},
        {"one row", {7}, {0}, 64, 64},
        {"one row that did not run", {0}, {0}, kBefore, kBefore},
        {"two rows", {1, 7}, {0, 1}, 64, 448},
    };
    for (const Case& now : cases) {
        for (const bool most_recent : {false, true}) {
            SCOPED_TRACE(testing::Message() << now.name << (most_recent ? ", most recent" : ", maximum"));
            OneColumn column{now.before};
            column.update(most_recent);
            expect_equal(column.history, now.after);
            const float expected = most_recent ? now.of_newest : now.of_maximum;
            EXPECT_EQ(column.scale, expected);
            EXPECT_EQ(column.scale_inv, static_cast<float>(1 / static_cast<double>(expected)));

            // What is not finite is cleared from row 0, and nothing else changes; elsewhere it counts as ever.
            OneColumn skipping{now.before};
            skipping.update(most_recent, true);
            const bool is_skipped = !std::isfinite(now.before[0]);
            Column cleared = now.before;
            cleared[0] = 0;
            expect_equal(skipping.history, is_skipped ? cleared : now.after);
            EXPECT_EQ(skipping.scale, is_skipped ? kBefore : expected);
        }
    }
}

TEST(Fp8UpdateCpu, AnInfiniteScaleBecomesTheLargestFiniteOne) {
    for (const float before : {kInfinity, -kInfinity}) {
        OneColumn column{{kNan, 0}, before};
        column.update();
        EXPECT_EQ(column.scale, FLT_MAX);
    }
}

TEST(Fp8UpdateCpu, AnInfinityHoldsTheScaleForAsManyUpdatesAsTheHistoryIsHigh) {
    OneColumn column{{0, 0, 0, 0}};
    const float amaxes[] = {1, kInfinity, 2, 2, 2, 2, 4};
    const float scales[] = {448, 448, 448, 448, 448, 224, 112};
    for (size_t step = 0; step < std::size(amaxes); ++step) {
        column.history[0] = amaxes[step];
        column.update();
        EXPECT_EQ(column.scale, scales[step]) << "update " << step;
    }
}

TEST(Fp8UpdateCpu, ColumnsOfAnyStrideAreUpdatedAsIfAloneAndNothingElseIsWritten) {
    constexpr int kHeight = 5, kColumns = 4, kStep = 3;
    auto generator = seeded_generator();
    std::uniform_real_distribution<float> numbers(0.5f, 9.0f);
    for (const bool is_row_major : {true, false}) {
        const int row_stride = is_row_major ? kColumns * kStep : 1, column_stride = is_row_major ? kStep : kHeight + 2;
        Column history(100, -1), scale(kColumns * kStep, -1), scale_inv(kColumns * 2, -1);
        std::vector<OneColumn> alone(kColumns);
        for (int j = 0; j < kColumns; ++j) {
            scale[j * kStep] = 2;
            for (int i = 0; i < kHeight; ++i) {
                const float number = i == 0 && j == 1 ? 0 : numbers(generator);
                history[i * row_stride + j * column_stride] = number;
                alone[j].history.push_back(number);
            }
        }
        Column expected_history = history, expected_scale = scale, expected_scale_inv = scale_inv;
        for (int j = 0; j < kColumns; ++j) {
            alone[j].update();
            for (int i = 0; i < kHeight; ++i) {
                expected_history[i * row_stride + j * column_stride] = alone[j].history[i];
            }
            expected_scale[j * kStep] = alone[j].scale;
            expected_scale_inv[j * 2] = alone[j].scale_inv;
        }
        amax_and_scale_update_cpu({.history = history.data(),
                                   .row_stride = row_stride,
                                   .column_stride = column_stride,
                                   .height = kHeight,
                                   .columns = kColumns,
                                   .scale = {scale.data(), kStep},
                                   .scale_inv = {scale_inv.data(), 2},
                                   .mask = {},
                                   .flag = {},
                                   .update_weight_scale_inv = true,
                                   .scaled_max = kLargest,
                                   .most_recent = false,
                                   .skip_nonfinite = false});
        EXPECT_EQ(history, expected_history);
        EXPECT_EQ(scale, expected_scale);
        EXPECT_EQ(scale_inv, expected_scale_inv);
    }
}

TEST(Fp8UpdateCpu, ScaleInvOfAWeightIsWrittenWhereTheFlagOrWithoutOneTheArgumentSaysSo) {
    const int32_t flags[] = {0, 3};
    const bool is_not_a_weight[] = {true, false, false, false, true};  // every other one is used
    for (const bool has_mask : {false, true}) {
        for (const bool argument : {false, true}) {
            for (const int flag : {-1, 0, 1}) {
                Column history{7, 7, 7}, scale(3, 1), scale_inv(3, -1);
                amax_and_scale_update_cpu({.history = history.data(),
                                           .row_stride = 3,
                                           .column_stride = 1,
                                           .height = 1,
                                           .columns = 3,
                                           .scale = {scale.data(), 1},
                                           .scale_inv = {scale_inv.data(), 1},
                                           .mask = {has_mask ? is_not_a_weight : nullptr, 2},
                                           .flag = flag < 0 ? Flag{} : Flag{&flags[flag], Flag::Kind::kInt32},
                                           .update_weight_scale_inv = argument,
                                           .scaled_max = kLargest,
                                           .most_recent = true,
                                           .skip_nonfinite = false});
                const bool for_weights = flag < 0 ? argument : flag == 1;
                const float of_weight = for_weights || !has_mask ? 1 / 64.0f : -1;
                EXPECT_EQ(scale, Column(3, 64));
                EXPECT_EQ(scale_inv, (Column{1 / 64.0f, of_weight, 1 / 64.0f})) << has_mask << argument << flag;
            }
        }
    }
}

TEST(Fp8Scale, AScaleIsTheQuotientCorrectlyRoundedOrThePowerOfTwoBelow) {
    auto generator = seeded_generator();
    std::uniform_real_distribution<float> exponents(-60, 60);
    for (int i = 0; i < 10000; ++i) {
        const float amax = std::exp2(exponents(generator)), scaled_max = i % 2 ? 448.0f : 57344.0f / 4;
        const double quotient = static_cast<double>(scaled_max) / amax;
        EXPECT_EQ(scale_of(amax, {.scaled_max = scaled_max}), static_cast<float>(quotient));
        const auto below = static_cast<float>(std::exp2(std::ilogb(static_cast<float>(quotient))));
        EXPECT_EQ(scale_of(amax, {.scaled_max = scaled_max, .power_of_2 = true}), below);
    }
    EXPECT_EQ(scale_of(7, {.scaled_max = 448, .power_of_2 = true}), 64);
}

TEST(Fp8Scale, EpsIsTheSmallestAmaxAndWhatIsNotUsableGivesOne) {
    EXPECT_EQ(scale_of(0, {.scaled_max = 448}), 1);
    EXPECT_EQ(scale_of(0, {.scaled_max = 448, .eps = 7}), 64);
    EXPECT_EQ(scale_of(6, {.scaled_max = 448, .eps = 7}), 64);
    EXPECT_EQ(scale_of(14, {.scaled_max = 448, .eps = 7}), 32);
    EXPECT_EQ(scale_of(1e-45f, {.scaled_max = 448}), FLT_MAX);
    EXPECT_EQ(scale_of(1e-45f, {.scaled_max = 448, .power_of_2 = true}), std::exp2(127.0f));
    for (const float eps : {0.0f, 7.0f}) {
        EXPECT_EQ(scale_of(kInfinity, {.scaled_max = 448, .eps = eps, .power_of_2 = true}), 1);
        EXPECT_EQ(scale_of(kNan, {.scaled_max = 448, .eps = eps, .power_of_2 = true}), 1);
    }
    const float amaxes[] = {7, 0, kNan, 3.5f};
    Column scales(4, -1);
    scale_cpu(amaxes, scales.data(), 4, {448});
    EXPECT_EQ(scales, (Column{64, 1, 1, 128}));
}

TEST(Fp8Scale, CurrentScalingPassesNansOnAndTakesTheLargestMagnitudeElse) {
    const auto run = [](const Column& x) {
        Column result(2, -1);
        uint32_t state[2];
        current_scale_cpu({.input = x.data(),
                           .numel = static_cast<int64_t>(x.size()),
                           .dtype = DType::kFloat32,
                           .amax = &result[0],
                           .scale = &result[1],
                           .state = state,
                           .rule = {448}});
        return result;
    };
    expect_equal(run({1, -7, 3}), {7, 64});
    expect_equal(run({}), {0, 1});
    expect_equal(run({1, -kInfinity, 3}), {kInfinity, 1});
    expect_equal(run({1, kNan, 3}), {kNan, 1});
    expect_equal(run({-kNan, kInfinity}), {kNan, 1});
}

}  // namespace
}  // namespace te_graph::fp8
