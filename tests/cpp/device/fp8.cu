// The FP8 kernels against the CPU loops, bit for bit. Where a number is NaN it is NaN on both, of whatever bits.
#include <cfloat>
#include <cmath>
#include <random>

#include "device_memory.h"
#include "fp8_cases.h"

namespace te_graph::fp8 {
namespace {

using multi_tensor::Buffer;
using multi_tensor::check;
using multi_tensor::DeviceTensor;
using multi_tensor::upload;

std::vector<Shape> shapes() {
    std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
    // Widths and heights at which eights, tiles and the blocks of 8192 elements begin and end.
    for (const int64_t size : {7, 8, 9, 127, 128, 129, 136}) {
        for (const int64_t other : {16, 64, 128, 144}) shapes.insert(shapes.end(), {{size, other}, {other, size}});
    }
    return shapes;
}

// A copy of a problem's memory on the device.
class OnDevice {
public:
    explicit OnDevice(const Problem& problem) : problem_(problem), buffer_(upload(problem.memory())) {}

    std::vector<Cast> casts() const { return problem_.casts(buffer_.at(0)); }

    // Equal to the host's memory in every byte, poison included.
    testing::AssertionResult has_equal_memory() const {
        const std::vector<uint64_t>& expected = problem_.memory();
        std::vector<uint64_t> actual(expected.size());
        buffer_.read(0, actual.data(), problem_.bytes());
        const auto places = std::mismatch(actual.begin(), actual.end(), expected.begin());
        if (places.first == actual.end()) return testing::AssertionSuccess();
        return testing::AssertionFailure() << "8 bytes at " << 8 * (places.first - actual.begin()) << ": expected "
                                           << std::hex << *places.second << ", got " << *places.first;
    }

private:
    const Problem& problem_;
    Buffer buffer_;
};

void cast_all_on_cpu(Problem& problem) {
    for (const Cast& cast : problem.casts()) cast_cpu(cast, {});
}

template <typename Function>
void for_each_matrix(std::mt19937_64& generator, const Function& function) {
    for (const Shape shape : shapes()) {
        for (const DType dtype : kInputs) {
            for (const Format format : kFormats) {
                Matrix matrix = random_matrix(generator);
                matrix.shape = shape;
                matrix.dtype = dtype;
                matrix.format = format;
                matrix.offset = generator() % 2;
                matrix.amax_before = generator() % 2 ? 700.0f : 0.0f;
                for (const bool is_counted : {false, true}) {
                    matrix.is_counted = is_counted;
                    function(matrix);
                }
            }
        }
    }
    function({.shape = kLargeShape, .dtype = DType::kBFloat16, .format = Format::kE4M3});
    function({.shape = kLargeShape, .dtype = DType::kFloat32, .format = Format::kE5M2, .is_counted = true});
}

TEST(Fp8CastDevice, ACastHasTheBytesOfTheCpuLoops) {
    auto generator = seeded_generator();
    for_each_matrix(generator, [&](Matrix matrix) {
        matrix.is_transposed = false;
        Problem problem;
        problem.add(matrix, generator);
        const OnDevice device(problem);
        check(launch_cast(device.casts()[0], {}, nullptr));
        cast_all_on_cpu(problem);
        EXPECT_TRUE(device.has_equal_memory()) << matrix;
    });
}

TEST(Fp8CastDevice, ACastWithATransposedCopyAndColumnSumsHasTheBytesOfTheCpuLoops) {
    auto generator = seeded_generator();
    for_each_matrix(generator, [&](const Matrix& matrix) {
        Problem without_sums;
        without_sums.add(matrix, generator);
        Problem with_sums = without_sums;
        const OnDevice device(without_sums), device_with_sums(with_sums);
        check(launch_cast_transpose(device.casts()[0], {}, {}, nullptr));
        cast_all_on_cpu(without_sums);
        ASSERT_TRUE(device.has_equal_memory()) << matrix;

        const DType sums_dtype = generator() % 2 ? matrix.dtype : DType::kFloat32;
        GuardedTensor sums(sums_dtype, matrix.shape.columns, 1);
        const DeviceTensor device_sums(sums);
        const Buffer partial(tiles_in(matrix.shape.rows) * matrix.shape.columns * sizeof(float));
        partial.fill(0xA5);
        for (const bool accumulate : {false, true}) {
            const ColumnSums column_sums{device_sums.data(), sums_dtype, reinterpret_cast<float*>(partial.at(0)),
                                         accumulate};
            check(launch_cast_transpose(device_with_sums.casts()[0], column_sums, {}, nullptr));
            cast_transpose_cpu(with_sums.casts()[0], {sums.data(), sums_dtype, nullptr, accumulate}, {});
            ASSERT_TRUE(device_with_sums.has_equal_memory()) << matrix;
            ASSERT_TRUE(same_numbers(device_sums.download(sums), sums)) << matrix;
        }
    });
}

// A list of casts in device memory.
class DeviceTable {
public:
    DeviceTable(const std::vector<Cast>& casts, int kind)
        : table_(upload(casts)),
          tiles_(upload(tiles_of_all(casts))),
          state_(2 * sizeof(uint32_t)),
          num_tiles_(static_cast<int64_t>(tiles_of_all(casts).size())),
          kind_(kind) {
        state_.fill(0);
    }
    CastTable casts() const {
        return {.casts = reinterpret_cast<const Cast*>(table_.at(0)),
                .count = 0,
                .tiles = reinterpret_cast<const Tile*>(tiles_.at(0)),
                .num_tiles = num_tiles_,
                .state = reinterpret_cast<uint32_t*>(state_.at(0)),
                .kind = kind_};
    }
    bool is_state_clear() const {
        uint32_t state[2];
        state_.read(0, state, sizeof(state));
        return state[0] == 0 && state[1] == 0;
    }

private:
    static std::vector<Tile> tiles_of_all(const std::vector<Cast>& casts) {
        std::vector<Tile> tiles;
        for (size_t entry = 0; entry < casts.size(); ++entry) {
            // Empty ones have a tile, too.
            for (int64_t index = 0; index < std::max<int64_t>(1, tiles_of(casts[entry])); ++index) {
                tiles.push_back({static_cast<int32_t>(entry), static_cast<int32_t>(index)});
            }
        }
        return tiles;
    }
    Buffer table_, tiles_, state_;
    int64_t num_tiles_;
    int kind_;
};

void expect_list_is_cast(Problem problem) {
    const OnDevice device(problem);
    const std::vector<Cast> casts = device.casts();
    check(launch_cast_weights(casts, {}, nullptr));
    cast_all_on_cpu(problem);
    ASSERT_TRUE(device.has_equal_memory()) << casts.size() << " matrices";
}

// Twice, so that what the first launch leaves behind shows.
void expect_table_is_cast(Problem problem, int kind) {
    const OnDevice device(problem);
    const DeviceTable table(device.casts(), kind);
    for (int run = 0; run < 2; ++run) {
        check(launch_cast_weights_table(table.casts(), {}, nullptr));
        cast_all_on_cpu(problem);
        ASSERT_TRUE(device.has_equal_memory()) << "kind " << kind << ", run " << run;
        ASSERT_TRUE(table.is_state_clear());
    }
}

TEST(Fp8CastsDevice, ListsAndTablesOfMixedMatricesHaveTheBytesOfTheCpuLoops) {
    auto generator = seeded_generator();
    // Up to 384 are kernel arguments of one launch.
    for (const int count : {1, 63, 64, 65, 300, 383, 384, 385, 1000}) {
        for (const bool are_counted : {false, true}) {
            Problem problem;
            for (int i = 0; i < count; ++i) {
                Matrix matrix = random_matrix(generator);
                if (generator() % 10 == 0) matrix.shape.rows = 0;
                matrix.is_counted = are_counted && (i == count / 2 || generator() % 5 == 0);
                problem.add(matrix, generator);
            }
            expect_list_is_cast(problem);
            expect_table_is_cast(problem, are_counted ? kCounted : kMixed);
        }
    }
}

TEST(Fp8CastsDevice, TablesOfOneKindOfAlignedMatricesHaveTheBytesOfTheCpuLoops) {
    auto generator = seeded_generator();
    for (const DType dtype : kInputs) {
        for (const Format format : kFormats) {
            Problem problem;
            for (int i = 0; i < 200; ++i) {
                Matrix matrix = random_matrix(generator);
                matrix.dtype = dtype;
                matrix.format = format;
                matrix.offset = 0;
                matrix.shape.columns = matrix.shape.columns / 8 * 8;
                problem.add(matrix, generator);
            }
            const int kind = kind_of(dtype, format);
            for (const Cast& cast : OnDevice(problem).casts()) ASSERT_EQ(kind_of(cast), kind);
            expect_table_is_cast(problem, kind);
        }
    }
}

TEST(Fp8CastsDevice, ASetFlagOfAnyDtypeLeavesEveryByteAsItWas) {
    auto generator = seeded_generator();
    for (const bool is_set : {false, true}) {
        const int32_t integer = is_set ? -5 : 0;
        const float number = is_set ? 0.5f : -0.0f;
        const Buffer device_integer(&integer, sizeof(integer)), device_number(&number, sizeof(number));
        const Buffer device_boolean(&is_set, sizeof(is_set));
        for (const Flag flag :
             {Flag{device_integer.at(0), Flag::Kind::kInt32}, Flag{device_boolean.at(0), Flag::Kind::kBool},
              Flag{device_number.at(0), Flag::Kind::kFloat32}}) {
            const auto expect_skipped = [&](int count, const auto& launch) {
                Problem problem;
                for (int i = 0; i < count; ++i) {
                    problem.add({.shape = {130 + i % 5, 129},
                                 .dtype = kInputs[i % 3],
                                 .format = kFormats[i % 2],
                                 .is_counted = true},
                                generator);
                }
                const OnDevice device(problem);
                launch(device.casts());
                EXPECT_EQ(static_cast<bool>(device.has_equal_memory()), is_set);
                if (!is_set) cast_all_on_cpu(problem);
                EXPECT_TRUE(device.has_equal_memory());
            };
            expect_skipped(1, [&](const std::vector<Cast>& casts) {
                Cast cast = casts[0];
                check(launch_cast(cast, flag, nullptr));
                // What the first launch does not write; counted once.
                cast.counts = nullptr;
                check(launch_cast_transpose(cast, {}, flag, nullptr));
            });
            expect_skipped(400,
                           [&](const std::vector<Cast>& casts) { check(launch_cast_weights(casts, flag, nullptr)); });
            expect_skipped(400, [&](const std::vector<Cast>& casts) {
                const DeviceTable table(casts, kCounted);
                check(launch_cast_weights_table(table.casts(), flag, nullptr));
                EXPECT_TRUE(table.is_state_clear());
            });
            GuardedTensor sums(DType::kFloat32, 129, 0);
            const DeviceTensor device_sums(sums);
            const Buffer partial(2 * 129 * sizeof(float));
            expect_skipped(1, [&](const std::vector<Cast>& casts) {
                check(launch_cast_transpose(
                    casts[0], {device_sums.data(), DType::kFloat32, reinterpret_cast<float*>(partial.at(0))}, flag,
                    nullptr));
            });
            EXPECT_EQ(static_cast<bool>(same_bytes(device_sums.download(sums), sums)), is_set);
        }
    }
}

}  // namespace
}  // namespace te_graph::fp8
