// FP8 on the CPU: numbers, casts and scales against the definitions of the formats in double precision.
#include <gtest/gtest.h>
#include <array>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "fp8/element_cpu.h"
#include "fp8/scale.h"
#include "fp8_cases.h"

namespace te_graph::fp8 {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = INFINITY;

// Reference: the number that sign, exponent and fraction stand for, special ones left out.
double number_of(uint64_t bits, int fraction_bits, int exponent_bits) {
    const auto fraction = static_cast<double>(bits & ((uint64_t{1} << fraction_bits) - 1));
    const int exponent = static_cast<int>(bits >> fraction_bits & ((1u << exponent_bits) - 1));
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double hidden = exponent == 0 ? 0 : std::exp2(fraction_bits);
    const double magnitude = (hidden + fraction) * std::exp2(std::max(exponent, 1) - bias - fraction_bits);
    return bits >> (fraction_bits + exponent_bits) & 1 ? -magnitude : magnitude;
}

double wide_value(uint64_t bits, DType dtype) {
    const multi_tensor::Format format = multi_tensor::format_of(dtype);
    if (format.is_nan(bits)) return kNan;
    if ((bits & (format.sign() - 1)) == format.infinity()) return bits & format.sign() ? -kInfinity : kInfinity;
    return number_of(bits, format.precision - 1, format.exponent_bits);
}

// Reference: e4m3fn has one NaN of either sign and no infinity, e5m2 is laid out as IEEE 754 formats are.
double fp8_value(int code, Format format) {
    const int magnitude = code & 0x7F;
    if (format == Format::kE4M3) return magnitude == 0x7F ? kNan : number_of(code, 3, 4);
    if (magnitude > 0x7C) return kNan;
    if (magnitude == 0x7C) return code & 0x80 ? -kInfinity : kInfinity;
    return number_of(code, 2, 5);
}
int largest_code(Format format) { return format == Format::kE4M3 ? 0x7E : 0x7B; }

// Reference: the nearest number of a format, found among all of them; of two as near, the one of even code.
class Nearest {
public:
    explicit Nearest(Format format) {
        for (int code = 0; code < largest_code(format); ++code) {
            middles_.push_back((fp8_value(code, format) + fp8_value(code + 1, format)) / 2);
        }
    }
    const std::vector<double>& middles() const { return middles_; }
    int operator()(double x) const {
        if (std::isnan(x)) return 0x7F;
        const auto middle = std::lower_bound(middles_.begin(), middles_.end(), std::fabs(x));
        int code = static_cast<int>(middle - middles_.begin());
        if (middle != middles_.end() && *middle == std::fabs(x) && code % 2 == 1) ++code;
        return code | (std::signbit(x) ? 0x80 : 0);
    }

private:
    std::vector<double> middles_;
};

TEST(Fp8Numbers, EveryNumberAndEveryTieAndTheirNeighboursAreRoundedToTheNearestNumber) {
    for (const Format format : kFormats) {
        const Nearest nearest(format);
        std::vector<double> places = nearest.middles();
        for (int code = 0; code <= largest_code(format); ++code) places.push_back(fp8_value(code, format));
        for (const double place : places) {
            const auto x = static_cast<float>(place);
            ASSERT_EQ(x, place);
            for (const float near : {x, std::nextafter(x, -1.0f), std::nextafter(x, kInfinity)}) {
                EXPECT_EQ(to_fp8(near, format), nearest(near)) << near;
                EXPECT_EQ(to_fp8(-near, format), nearest(-near)) << -near;
            }
        }
        auto generator = seeded_generator();
        for (int i = 0; i < 1'000'000; ++i) {
            const auto bits = static_cast<uint32_t>(random_bits(DType::kFloat32, Values::kAny, generator));
            const float x = as_float(bits);
            ASSERT_EQ(to_fp8(x, format), nearest(x)) << x;
        }
    }
}

TEST(Fp8Numbers, WhatIsTooLargeBecomesTheLargestNumberAndNanStaysNan) {
    for (const Format format : kFormats) {
        const float largest = max_of(format);
        EXPECT_EQ(fp8_value(largest_code(format), format), largest);
        for (const float x :
             {largest, std::nextafter(largest, kInfinity), 1.05f * largest, 1e30f, FLT_MAX, kInfinity}) {
            EXPECT_EQ(to_fp8(x, format), largest_code(format)) << x;
            EXPECT_EQ(to_fp8(-x, format), largest_code(format) | 0x80) << x;
        }
        for (const float x : {kNan, -kNan, as_float(0x7F800001)}) EXPECT_EQ(to_fp8(x, format), 0x7F);
        EXPECT_EQ(to_fp8(0.0f, format), 0);
        EXPECT_EQ(to_fp8(-0.0f, format), 0x80);
    }
}

TEST(Fp8Numbers, AllCodesWidenToTheirNumberAndComeBack) {
    for (const Format format : kFormats) {
        for (int code = 0; code < 256; ++code) {
            const double expected = fp8_value(code, format);
            const float x = widen(static_cast<uint8_t>(code), format);
            float dequantized = 0;
            const auto byte = static_cast<uint8_t>(code);
            const float half = 0.5f;
            dequantize_cpu({&byte, &dequantized, &half, 1, format, DType::kFloat32});
            if (std::isnan(expected)) {
                EXPECT_TRUE(std::isnan(x) && std::isnan(dequantized)) << code;
                EXPECT_EQ(to_fp8(x, format), 0x7F);
                continue;
            }
            EXPECT_EQ(x, expected) << code;
            EXPECT_EQ(dequantized, expected / 2) << code;
            EXPECT_EQ(std::signbit(x), code >= 0x80) << code;
            EXPECT_EQ(to_fp8(x, format), std::isinf(expected) ? (code & 0x80) | largest_code(format) : code);
        }
    }
}

// Compares a cast that was made, whose counts were 1, 2 and 3 before, with the definition.
void expect_cast(const Cast& cast, const Matrix& matrix) {
    const Nearest nearest(cast.format);
    const size_t bytes = multi_tensor::format_of(cast.dtype).bytes;
    double amax = matrix.amax_before;
    int64_t counts[kCounts] = {1, 2, 3}, wrong = 0, wrong_t = 0;
    for (int64_t i = 0; i < cast.rows * cast.columns; ++i) {
        uint64_t bits = 0;
        std::memcpy(&bits, static_cast<const char*>(cast.input) + i * bytes, bytes);
        const double x = wide_value(bits, cast.dtype);
        // Exact in double precision, so this rounds as a product of fp32 does.
        const auto product = static_cast<float>(x * *cast.scale);
        const int code = nearest(product);
        wrong += cast.out[i] != code;
        wrong_t += cast.out_t[i % cast.columns * cast.rows + i / cast.columns] != code;
        if (!std::isnan(x)) amax = std::max(amax, std::fabs(x));
        counts[kNotFinite] += !std::isfinite(x);
        counts[kSaturated] += std::isfinite(x) && std::fabs(product) > max_of(cast.format);
        counts[kUnderflowed] += x != 0 && *cast.scale != 0 && code % 0x80 == 0;
    }
    EXPECT_EQ(wrong, 0) << matrix;
    EXPECT_EQ(wrong_t, 0) << matrix;
    EXPECT_EQ(*cast.amax, amax) << matrix;
    EXPECT_EQ(*cast.scale_inv, static_cast<float>(1 / static_cast<double>(*cast.scale))) << matrix;
    for (int i = 0; i < kCounts; ++i) EXPECT_EQ(cast.counts[i], counts[i]) << matrix << ", count " << i;
}

TEST(Fp8CastCpu, CastsAmaxScaleInvAndCountsAreThoseOfTheDefinition) {
    auto generator = seeded_generator();
    for (const Shape shape : kShapes) {
        for (const DType dtype : kInputs) {
            for (const Format format : kFormats) {
                const Matrix matrix{.shape = shape,
                                    .dtype = dtype,
                                    .format = format,
                                    .scale = kScales[generator() % std::size(kScales)],
                                    .values = kAllValues[generator() % 3],
                                    .is_counted = true,
                                    .offset = 1,
                                    .amax_before = generator() % 2 ? 0.0f : 700.0f};
                Problem problem;
                problem.add(matrix, generator);
                cast_cpu(problem.casts()[0], {});
                expect_cast(problem.casts()[0], matrix);
            }
        }
    }
}

TEST(Fp8CastCpu, ColumnSumsAreCloseToThoseOfDoublePrecision) {
    auto generator = seeded_generator();
    for (const Shape shape : kShapes) {
        for (const DType dtype : kInputs) {
            for (const DType sums_dtype : {DType::kFloat32, dtype}) {
                const Values values = generator() % 2 ? Values::kFinite : Values::kWithNan;
                Problem problem;
                problem.add({.shape = shape, .dtype = dtype, .format = Format::kE4M3, .values = values}, generator);
                const Cast cast = problem.casts()[0];
                GuardedTensor sums(sums_dtype, shape.columns, 1);
                cast_transpose_cpu(cast, {sums.data(), sums_dtype}, {});
                const multi_tensor::Format from = multi_tensor::format_of(dtype), to = sums.format();
                for (int64_t column = 0; column < shape.columns; ++column) {
                    double sum = 0, magnitudes = 0;
                    for (int64_t row = 0; row < shape.rows; ++row) {
                        uint64_t bits = 0;
                        std::memcpy(&bits,
                                    static_cast<const char*>(cast.input) + (row * shape.columns + column) * from.bytes,
                                    from.bytes);
                        const double x = wide_value(bits, dtype);
                        sum += x;
                        magnitudes += std::fabs(x);
                    }
                    // Roundings of fp32 on the way of an element into the sum, and that of the result.
                    const double steps = kGroupRows + kTile / kGroupRows + static_cast<double>(tiles_in(shape.rows));
                    const double bound = steps * std::exp2(-24) * magnitudes +
                                         std::exp2(-to.precision) * std::fabs(sum) + std::exp2(-25);
                    const double actual = wide_value(sums.get(column), sums_dtype);
                    if (std::isnan(sum)) {
                        ASSERT_TRUE(std::isnan(actual));
                    } else {
                        ASSERT_NEAR(actual, sum, bound) << shape.rows << " x " << shape.columns << ' ' << to.name;
                    }
                }
            }
        }
    }
}

TEST(Fp8CastCpu, ColumnSumsAddEightRowsThenSixteenGroupsThenTiles) {
    // 2^24 + 1 is no number of fp32: a one that is added alone is lost, two that are added to each other first are not.
    constexpr float kBig = 16777216;
    struct Case {
        std::vector<int64_t> ones;
        float expected;
    };
    for (const Case& now : {Case{{1, 2}, kBig}, Case{{8, 9}, kBig + 2}, Case{{8, 16}, kBig}, Case{{128, 136}, kBig + 2},
                            Case{{128, 256}, kBig}}) {
        std::vector<float> input(257);
        input[0] = kBig;
        for (const int64_t row : now.ones) input[row] = 1;
        std::vector<uint8_t> out(257);
        const float scale = 1;
        float sum = kNan;
        Cast cast{};
        cast.input = input.data();
        cast.out = out.data();
        cast.scale = &scale;
        cast.rows = 257;
        cast.columns = 1;
        cast_transpose_cpu(cast, {&sum, DType::kFloat32}, {});
        EXPECT_EQ(sum, now.expected) << "ones in rows " << now.ones[0] << " and " << now.ones[1];
    }
}

TEST(Fp8CastCpu, ColumnSumsAreRoundedBeforeTheyAreAdded) {
    // In bfloat16 1 + 2^-9 is 1, and 1 + 2^-8 again; the sum of all three is 1 + 2^-7.
    constexpr uint16_t kOne = 0x3F80;
    const std::array<uint16_t, 2> input{kOne, 0x3B00};
    std::array<uint8_t, 2> out;
    const float scale = 1;
    uint16_t sum = 0x3B80;
    Cast cast{};
    cast.input = input.data();
    cast.out = out.data();
    cast.scale = &scale;
    cast.rows = 2;
    cast.columns = 1;
    cast.dtype = DType::kBFloat16;
    cast_transpose_cpu(cast, {&sum, DType::kBFloat16, nullptr, true}, {});
    EXPECT_EQ(sum, kOne);
}

TEST(Fp8CastCpu, ASetFlagOfAnyDtypeLeavesEveryByteAsItWas) {
    auto generator = seeded_generator();
    const int32_t integers[] = {0, -5};
    const bool booleans[] = {false, true};
    const float floats[] = {-0.0f, 0.5f};
    for (const int is_set : {0, 1}) {
        for (const Flag flag : {Flag{&integers[is_set], Flag::Kind::kInt32}, Flag{&booleans[is_set], Flag::Kind::kBool},
                                Flag{&floats[is_set], Flag::Kind::kFloat32}}) {
            Problem problem;
            problem.add({.shape = {9, 11}, .dtype = DType::kFloat32, .format = Format::kE5M2, .is_counted = true},
                        generator);
            GuardedTensor sums(DType::kFloat32, 11, 0);
            const GuardedTensor sums_before = sums;
            const std::vector<uint64_t> before = problem.memory();
            cast_transpose_cpu(problem.casts()[0], {sums.data(), DType::kFloat32}, flag);
            EXPECT_EQ(problem.memory() == before, is_set == 1);
            EXPECT_EQ(static_cast<bool>(same_bytes(sums, sums_before)), is_set == 1);
        }
    }
}

}  // namespace
}  // namespace te_graph::fp8
