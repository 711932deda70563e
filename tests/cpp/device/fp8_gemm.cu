// Products of FP8 matrices by cuBLASLt against sums of integers, which are exact in whatever parts they are taken.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "device_memory.h"
#include "fp8/element_cpu.h"
#include "fp8/gemm.h"
#include "seed.h"

namespace te_graph::fp8 {
namespace {

using multi_tensor::Buffer;
using multi_tensor::check;
using multi_tensor::upload;

bool is_supported() {
    int device = 0;
    cudaGetDevice(&device);
    return has_fp8_gemm(device);
}

// Small integers, and their product in float32.
struct Product {
    GemmShape shape;
    std::vector<uint64_t> a, b;  // bytes of FP8, padded to whole words
    std::vector<float> expected;

    Product(const GemmShape& shape, std::mt19937_64& generator) : shape(shape) {
        const auto integers = [&](int64_t rows, int64_t stride, Format format, std::vector<uint64_t>& words) {
            std::vector<int> values(static_cast<size_t>(rows * stride));
            words.assign(static_cast<size_t>((rows * stride + 7) / 8), 0);
            auto* const bytes = reinterpret_cast<uint8_t*>(words.data());
            for (size_t i = 0; i < values.size(); ++i) {
                values[i] = static_cast<int>(generator() % 9) - 4;
                bytes[i] = to_fp8(static_cast<float>(values[i]), format);
            }
            return values;
        };
        const auto left = integers(shape.rows, shape.a_stride, shape.a_format, a);
        const auto right = integers(shape.columns, shape.b_stride, shape.b_format, b);
        for (int64_t row = 0; row < shape.rows; ++row) {
            for (int64_t column = 0; column < shape.columns; ++column) {
                int64_t sum = 0;
                for (int64_t i = 0; i < shape.inner; ++i) {
                    sum += left[static_cast<size_t>(row * shape.a_stride + i)] *
                           right[static_cast<size_t>(column * shape.b_stride + i)];
                }
                expected.push_back(static_cast<float>(sum) * 0.5f * 4.0f);
            }
        }
    }
};

std::vector<float> multiply(const Product& product, cudaStream_t stream) {
    const Buffer a = upload(product.a), b = upload(product.b);
    // At multiples of 16 bytes.
    const Buffer scales = upload(std::vector<float>{0.5f, 0, 0, 0, 4.0f});
    const Buffer out = upload(std::vector<float>(product.expected.size(), 3.0f));
    const auto plan = gemm_plan(product.shape);
    const Buffer workspace = upload(std::vector<uint64_t>(workspace_of(*plan) / 8 + 1));
    const Gemm work{.a = reinterpret_cast<const uint8_t*>(a.at(0)),
                    .b = reinterpret_cast<const uint8_t*>(b.at(0)),
                    .a_scale_inv = reinterpret_cast<const float*>(scales.at(0)),
                    .b_scale_inv = reinterpret_cast<const float*>(scales.at(16)),
                    .bias = nullptr,
                    .out = out.at(0),
                    .shape = product.shape};
    launch_gemm(work, *plan, workspace.at(0), stream);
    check(cudaStreamSynchronize(stream));
    std::vector<float> result(product.expected.size());
    out.read(0, result.data(), result.size() * sizeof(float));
    return result;
}

GemmShape shape_of(int64_t rows, int64_t columns, int64_t inner, int64_t gap = 0) {
    return {.rows = rows,
            .columns = columns,
            .inner = inner,
            .a_stride = inner + gap,
            .b_stride = inner + gap,
            .a_format = Format::kE4M3,
            .b_format = Format::kE4M3,
            .dtype = DType::kFloat32,
            .has_bias = false,
            .fast_accum = false,
            .accumulate = false};
}

TEST(Fp8GemmDevice, ProductsOfIntegersAreExact) {
    if (!is_supported()) GTEST_SKIP() << "no FP8 tensor cores";
    auto generator = seeded_generator();
    for (const int64_t rows : {1, 2, 7, 16, 129}) {
        for (const int64_t inner : {16, 32, 48, 144, 1040, 8208}) {
            GemmShape shape = shape_of(rows, 64, inner, inner == 144 ? 16 : 0);
            (generator() % 2 ? shape.a_format : shape.b_format) = Format::kE5M2;
            const Product product(shape, generator);
            EXPECT_EQ(multiply(product, nullptr), product.expected) << rows << " x 64 x " << inner;
            shape.accumulate = true;
            Product added(shape, generator);
            for (float& value : added.expected) value += 3.0f;
            EXPECT_EQ(multiply(added, nullptr), added.expected) << rows << " x 64 x " << inner << ", added";
        }
    }
}

TEST(Fp8GemmDevice, OnePlanServesThreads) {
    if (!is_supported()) GTEST_SKIP() << "no FP8 tensor cores";
    auto generator = seeded_generator();
    const Product product(shape_of(33, 128, 2048), generator);
    multiply(product, nullptr);
    const size_t plans = gemm_plans().size();
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
            cudaStream_t stream;
            check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            for (int turn = 0; turn < 20; ++turn) EXPECT_EQ(multiply(product, stream), product.expected);
            check(cudaStreamDestroy(stream));
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(gemm_plans().size(), plans);
    EXPECT_EQ(gemm_plans().front().shape, product.shape);
}

TEST(Fp8GemmDevice, APlanIsMadeInsideACapture) {
    if (!is_supported()) GTEST_SKIP() << "no FP8 tensor cores";
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    const size_t before = gemm_plans().size();
    const auto plan = gemm_plan(shape_of(21, 48, 208));
    cudaGraph_t graph;
    check(cudaStreamEndCapture(stream, &graph));
    EXPECT_EQ(gemm_plans().size(), before + 1);
    EXPECT_EQ(gemm_plan(shape_of(21, 48, 208)), plan);
    check(cudaGraphDestroy(graph));
    check(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace te_graph::fp8
