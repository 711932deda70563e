// Activations and layer norms on the CPU, which are cast where they are made: against double precision, and the order
// of sums on rows written down by hand.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "fp8/activation_cast.h"
#include "fp8/element_cpu.h"
#include "fp8/layer_norm.h"
#include "seed.h"

namespace te_graph::fp8 {
namespace {

constexpr double kSqrtTwo = 1.41421356237309504880, kPi = 3.14159265358979323846;

// References.
double exact(Activation activation, double x) {
    switch (activation) {
        case Activation::kGelu:
            return x / 2 * (1 + std::erf(x / kSqrtTwo));
        case Activation::kGeluTanh:
            return x / 2 * (1 + std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x)));
        case Activation::kRelu:
            return x > 0 ? x : 0;
        case Activation::kSilu:
            return x / (1 + std::exp(-x));
    }
    return std::numeric_limits<double>::quiet_NaN();
}
double slope(Activation activation, double x) {
    if (activation == Activation::kRelu) return x > 0;
    const double step = 1e-5;
    return (exact(activation, x + step) - exact(activation, x - step)) / (2 * step);
}

TEST(Fp8Activation, ValuesAndSlopesAreThoseOfDoublePrecision) {
    auto generator = seeded_generator();
    std::uniform_real_distribution<float> uniform(-12, 12);
    for (const Activation activation : kActivations) {
        for (int i = 0; i < 20000; ++i) {
            const float x = i < 100 ? static_cast<float>(i - 50) / 4 : uniform(generator), dy = uniform(generator);
            if (activation == Activation::kRelu && x == 0) continue;
            // What cancels in 1 + erf(x) and the like is as large as x.
            const double error = 1e-6 * (std::fabs(x) + 1);
            EXPECT_NEAR(activated(activation, x), exact(activation, x), error) << name_of(activation) << ' ' << x;
            const double of_slope = 1e-6 * (std::fabs(x) + 1) * std::fabs(dy) + 1e-8;
            EXPECT_NEAR(activation_backward(activation, dy, x), dy * slope(activation, x), of_slope)
                << name_of(activation) << ' ' << x;
        }
    }
}

// What a matrix [rows, columns] of fp32 is cast to at scale 1, read back, with its column sums.
struct Made {
    std::vector<uint8_t> bytes, transposed;
    std::vector<float> sums;
    float amax = 0, scale_inv = 0, scale = 1;
    int64_t rows, columns;
    Made(int64_t rows, int64_t columns)
        : bytes(rows * columns),
          transposed(columns * padded(rows), 0xA5),
          sums(columns),
          rows(rows),
          columns(columns) {}
    Cast cast() {
        Cast cast{};
        cast.out = bytes.data();
        cast.out_t = transposed.data();
        cast.scale = &scale;
        cast.scale_inv = &scale_inv;
        cast.amax = &amax;
        cast.rows = rows;
        cast.columns = columns;
        cast.pads_out_t = true;
        return cast;
    }
    ColumnSums column_sums() {
        ColumnSums result;
        result.out = sums.data();
        return result;
    }
    float operator()(int64_t row, int64_t column) const {
        const uint8_t byte = bytes[row * columns + column];
        EXPECT_EQ(transposed[column * padded(rows) + row], byte);
        return widen(byte, Format::kE4M3);
    }
};

TEST(Fp8Activation, AGateMultipliesAndBothHalvesHaveTheirGradients) {
    // Two rows of gate and up, eight columns each; all products are FP8 numbers.
    std::vector<float> x(32), grad(16);
    for (int i = 0; i < 32; ++i) x[i] = static_cast<float>(i % 4 - 1);
    for (int i = 0; i < 16; ++i) grad[i] = static_cast<float>(i % 4);
    ActivationArguments work{.x = x.data(),
                             .grad = nullptr,
                             .rows = 2,
                             .columns = 8,
                             .dtype = DType::kFloat32,
                             .activation = Activation::kRelu,
                             .is_gated = true,
                             .is_backward = false};
    Made y(2, 8), grad_x(2, 16);
    activation_cast_cpu(work, y.cast(), {});
    work.grad = grad.data();
    work.is_backward = true;
    activation_cast_cpu(work, grad_x.cast(), grad_x.column_sums());
    for (int row = 0; row < 2; ++row) {
        for (int column = 0; column < 8; ++column) {
            const float gate = x[row * 16 + column], up = x[row * 16 + 8 + column], dy = grad[row * 8 + column];
            EXPECT_EQ(y(row, column), std::fmax(gate, 0.0f) * up);
            EXPECT_EQ(grad_x(row, column), gate > 0 ? dy * up : 0.0f);
            EXPECT_EQ(grad_x(row, 8 + column), dy * std::fmax(gate, 0.0f));
        }
    }
    for (int column = 0; column < 16; ++column) {
        EXPECT_EQ(grad_x.sums[column], grad_x(0, column) + grad_x(1, column));
        for (int64_t row = 2; row < padded(2); ++row) EXPECT_EQ(grad_x.transposed[column * padded(2) + row], 0);
    }
    EXPECT_EQ(y.amax, 4);
    EXPECT_EQ(y.scale_inv, 1);
}

TEST(Fp8LayerNorm, LanesOfARowAddEightsThatLieThirtyTwoApart) {
    // 2^24 + 1 is no number of fp32: a one that lane 0 adds to 2^24 is lost, two that another lane adds first are not.
    constexpr float kBig = 16777216;
    struct Case {
        std::vector<int> ones;
        float expected;
    };
    for (const Case& now :
         {Case{{1, 2}, kBig}, Case{{256, 257}, kBig}, Case{{8, 9}, kBig + 2}, Case{{8, 264}, kBig + 2},
          Case{{8, 128}, kBig}, Case{{128, 384}, kBig + 2}, Case{{64, 192}, kBig + 2}}) {
        std::vector<float> x(512);
        x[0] = kBig;
        for (const int column : now.ones) x[column] = 1;
        float mean = 0, rstd = 0;
        layer_norm_stats_cpu({.x = x.data(),
                              .residual = nullptr,
                              .sum = nullptr,
                              .mean = &mean,
                              .rstd = &rstd,
                              .rows = 1,
                              .columns = 512,
                              .dtype = DType::kFloat32,
                              .eps = 0});
        EXPECT_EQ(mean, now.expected / 512) << "ones in columns " << now.ones[0] << " and " << now.ones[1];
    }
}

TEST(Fp8LayerNorm, ForwardAndBackwardAreCloseToDoublePrecision) {
    constexpr int kRowsHere = 3, kColumns = 40;
    constexpr float kEps = 0.25f;
    auto generator = seeded_generator();
    std::normal_distribution<float> normal(0.5f, 2);
    for (const bool rms_norm : {false, true}) {
        for (const bool zero_centered : {false, true}) {
            std::vector<float> x(kRowsHere * kColumns), residual = x, sum = x, dy = x, more = x, ds = x;
            std::vector<float> weight(kColumns), bias(kColumns), weight_sums(kColumns), bias_sums(kColumns);
            for (auto* const values : {&x, &residual, &dy, &more, &weight, &bias}) {
                for (float& value : *values) value = normal(generator);
            }
            std::array<float, kRowsHere> mean{}, rstd{};
            layer_norm_stats_cpu({.x = x.data(),
                                  .residual = residual.data(),
                                  .sum = sum.data(),
                                  .mean = rms_norm ? nullptr : mean.data(),
                                  .rstd = rstd.data(),
                                  .rows = kRowsHere,
                                  .columns = kColumns,
                                  .dtype = DType::kFloat32,
                                  .eps = kEps});
            const LayerNorm norm{.sum = sum.data(),
                                 .weight = weight.data(),
                                 .bias = bias.data(),
                                 .mean = rms_norm ? nullptr : mean.data(),
                                 .rstd = rstd.data(),
                                 .rows = kRowsHere,
                                 .columns = kColumns,
                                 .dtype = DType::kFloat32,
                                 .weight_dtype = DType::kFloat32,
                                 .zero_centered = zero_centered};
            Made y(kRowsHere, kColumns), of_ds(kRowsHere, kColumns);
            layer_norm_cast_cpu(norm, y.cast());
            LayerNormBackward backward{};
            backward.norm = norm;
            backward.grad = dy.data();
            backward.grad_sum = more.data();
            backward.grad_x = ds.data();
            backward.weight_sums.out = weight_sums.data();
            backward.bias_sums.out = bias_sums.data();
            backward.is_cast = true;
            layer_norm_backward_cpu(backward, of_ds.cast(), of_ds.column_sums());

            std::array<double, kColumns> weight_total{}, bias_total{};
            for (int row = 0; row < kRowsHere; ++row) {
                const auto at = [&](const std::vector<float>& values, int i) -> double {
                    return values[row * kColumns + i];
                };
                const auto s = [&](int i) { return at(x, i) + at(residual, i); };
                const auto gain = [&](int i) { return weight[i] + (zero_centered ? 1.0 : 0.0); };
                double center = 0, squares = 0, along = 0, level = 0;
                for (int i = 0; i < kColumns; ++i) center += rms_norm ? 0 : s(i) / kColumns;
                for (int i = 0; i < kColumns; ++i) squares += (s(i) - center) * (s(i) - center) / kColumns;
                const double inverse = 1 / std::sqrt(squares + kEps);
                const auto n = [&](int i) { return (s(i) - center) * inverse; };
                for (int i = 0; i < kColumns; ++i) {
                    along += at(dy, i) * gain(i) * n(i) / kColumns;
                    level += rms_norm ? 0 : at(dy, i) * gain(i) / kColumns;
                }
                EXPECT_NEAR(rstd[row], inverse, 1e-5 * inverse);
                for (int i = 0; i < kColumns; ++i) {
                    const double expected = n(i) * gain(i) + bias[i];
                    EXPECT_NEAR(y(row, i), expected, std::fabs(expected) / 15 + 0.01);
                    const double grad = (at(dy, i) * gain(i) - n(i) * along - level) * inverse + at(more, i);
                    EXPECT_NEAR(at(ds, i), grad, 1e-4);
                    EXPECT_NEAR(of_ds(row, i), grad, std::fabs(grad) / 15 + 0.01);
                    weight_total[i] += at(dy, i) * n(i);
                    bias_total[i] += at(dy, i);
                }
            }
            for (int i = 0; i < kColumns; ++i) {
                EXPECT_NEAR(weight_sums[i], weight_total[i], 1e-4);
                EXPECT_NEAR(bias_sums[i], bias_total[i], 1e-4);
                EXPECT_NEAR(of_ds.sums[i], ds[i] + ds[kColumns + i] + ds[2 * kColumns + i], 1e-5);
            }
        }
    }
}

}  // namespace
}  // namespace te_graph::fp8
