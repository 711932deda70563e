// The kernels of FP8 scales and of casts back against the CPU loops, bit for bit. Where a cast back is NaN it is NaN on
// both, of whatever bits.
#include <cfloat>
#include <cmath>
#include <random>

#include "device_memory.h"
#include "fp8/scale.h"
#include "fp8_cases.h"

namespace te_graph::fp8 {
namespace {

using multi_tensor::Buffer;
using multi_tensor::check;
using multi_tensor::DeviceTensor;
using multi_tensor::upload;

// What an update reads and writes, in one piece of memory of 32-bit words, poison between the elements.
struct History {
    // Elements of the history lie `gap` apart; neighbours in a row, or in a column of a transposed one.
    int height, columns, gap;
    bool is_transposed;
    std::vector<uint32_t> words;

    History(int height, int columns, int gap, bool is_transposed, std::mt19937_64& generator)
        : height(height),
          columns(columns),
          gap(gap),
          is_transposed(is_transposed),
          words(size_t(height) * columns * gap + 5 * columns + 16, 0xA5A5A5A5u) {
        constexpr float kSpecial[] = {NAN, INFINITY, 1e-45f, FLT_MAX, 448 / FLT_MAX / 2, 0};
        std::uniform_real_distribution<float> numbers(1e-3f, 1e3f);
        for (int i = 0; i < height * columns; ++i) {
            // Few of them, so that in most columns the maximum is a number.
            const int row = is_transposed ? i % height : i / columns;
            const bool is_special = generator() % (row == 0 ? 3 : 2 * height) == 0;
            put(size_t(i) * gap, is_special ? kSpecial[generator() % std::size(kSpecial)] : numbers(generator));
        }
        for (int column = 0; column < columns; ++column) {
            put(scale_at() + 2 * column, column % 5 == 4 ? INFINITY : numbers(generator));
            masks_at(words.data())[column] = generator() % 2;
        }
    }

    void put(size_t at, float number) { std::memcpy(&words[at], &number, sizeof(number)); }
    size_t scale_at() const { return size_t(height) * columns * gap + 4; }
    size_t scale_inv_at() const { return scale_at() + 2 * columns; }
    bool* masks_at(uint32_t* base) const { return reinterpret_cast<bool*>(base + scale_inv_at() + 2 * columns + 4); }

    Update update(void* memory) const {
        auto* const base = static_cast<float*>(memory);
        return {.history = base,
                .row_stride = is_transposed ? gap : int64_t{gap} * columns,
                .column_stride = is_transposed ? int64_t{gap} * height : gap,
                .height = height,
                .columns = columns,
                .scale = {base + scale_at(), 2},
                .scale_inv = {base + scale_inv_at(), 2},
                .mask = {masks_at(static_cast<uint32_t*>(memory)), 1},
                .flag = {},
                .update_weight_scale_inv = false,
                .scaled_max = 448,
                .most_recent = false,
                .skip_nonfinite = false};
    }
};

TEST(Fp8UpdateDevice, HistoriesAndScalesHaveTheBytesOfTheCpuLoops) {
    auto generator = seeded_generator();
    const int32_t flags[] = {0, 7};
    const Buffer device_flags(flags, sizeof(flags));
    for (const int height : {1, 2, 31, 1024, 1025, 2050}) {
        for (const int columns : {1, 7, 300}) {
            for (int options = 0; options < 64; ++options) {
                if (height * columns > 100'000 && options % 7 != 0) continue;
                History history(height, columns, options & 1 ? 3 : 1, options & 2, generator);
                const Buffer device = upload(history.words);
                Update on_cpu = history.update(history.words.data()), on_device = history.update(device.at(0));
                // Without a flag, with one that is not set, with one that is; the argument says the opposite.
                const int flag = static_cast<int>(generator() % 3) - 1;
                if (flag >= 0) {
                    on_cpu.flag = {&flags[flag], Flag::Kind::kInt32};
                    on_device.flag = {device_flags.at(flag * sizeof(int32_t)), Flag::Kind::kInt32};
                }
                for (Update* const update : {&on_cpu, &on_device}) {
                    update->most_recent = options & 4;
                    update->skip_nonfinite = options & 8;
                    update->update_weight_scale_inv = flag < 0 ? (options & 16) != 0 : flag == 0;
                    if (options & 32) update->mask = {};
                }
                // A second one sees the row that the first one put to the end.
                for (int run = 0; run < 2; ++run) {
                    check(launch_amax_and_scale_update(on_device, nullptr));
                    amax_and_scale_update_cpu(on_cpu);
                    std::vector<uint32_t> words(history.words.size());
                    device.read(0, words.data(), words.size() * sizeof(uint32_t));
                    ASSERT_EQ(words == history.words, true) << height << " x " << columns << ", options " << options
                                                            << ", flag " << flag << ", run " << run;
                    history.put(0, 5);
                    device.write(0, history.words.data(), words.size() * sizeof(uint32_t));
                }
            }
        }
    }
}

TEST(Fp8UpdateDevice, AFlagOfAnyDtypeSaysWhetherScaleInvOfWeightsIsWritten) {
    auto generator = seeded_generator();
    for (const bool is_set : {false, true}) {
        const int32_t integer = is_set ? -5 : 0;
        const float number = is_set ? 0.5f : -0.0f;
        const Buffer device_integer(&integer, sizeof(integer)), device_number(&number, sizeof(number));
        const Buffer device_boolean(&is_set, sizeof(is_set));
        for (const Flag flag :
             {Flag{device_integer.at(0), Flag::Kind::kInt32}, Flag{device_boolean.at(0), Flag::Kind::kBool},
              Flag{device_number.at(0), Flag::Kind::kFloat32}}) {
            History history(31, 40, 1, false, generator);
            const Buffer device = upload(history.words);
            Update on_cpu = history.update(history.words.data()), on_device = history.update(device.at(0));
            on_device.flag = flag;
            on_device.update_weight_scale_inv = !is_set;
            on_cpu.update_weight_scale_inv = is_set;
            check(launch_amax_and_scale_update(on_device, nullptr));
            amax_and_scale_update_cpu(on_cpu);
            std::vector<uint32_t> words(history.words.size());
            device.read(0, words.data(), words.size() * sizeof(uint32_t));
            EXPECT_TRUE(words == history.words) << is_set;
        }
    }
}

constexpr ScaleRule kRules[] = {{448}, {57344, 1e-3f}, {448, 0, true}, {112, 1e4f, true}};

TEST(Fp8ScaleDevice, CurrentScalesHaveTheBitsOfTheCpuLoops) {
    auto generator = seeded_generator();
    for (const int64_t numel : {0, 1, 7, 8, 9, 2047, 2048, 2049, 100'003, 6'000'000}) {
        for (const DType dtype : kInputs) {
            for (const Values values : kAllValues) {
                const int64_t offset = static_cast<int64_t>(generator() % 2);
                GuardedTensor input(dtype, numel, offset);
                for (int64_t i = 0; i < numel; ++i) input.set(i, random_bits(dtype, values, generator));
                const DeviceTensor device_input(input);
                for (const ScaleRule& rule : kRules) {
                    const Buffer results(2 * sizeof(uint32_t)), state(2 * sizeof(uint32_t));
                    results.fill(0xA5);
                    state.fill(0xA5);
                    auto* const device_results = reinterpret_cast<float*>(results.at(0));
                    float on_cpu[2];
                    uint32_t expected[2], actual[2];
                    check(launch_current_scale({device_input.data(), numel, dtype, device_results, device_results + 1,
                                                reinterpret_cast<uint32_t*>(state.at(0)), rule},
                                               nullptr));
                    current_scale_cpu({input.data(), numel, dtype, &on_cpu[0], &on_cpu[1], nullptr, rule});
                    std::memcpy(expected, on_cpu, sizeof(expected));
                    results.read(0, actual, sizeof(actual));
                    EXPECT_EQ(actual[0], expected[0]) << numel << ", amax " << on_cpu[0];
                    EXPECT_EQ(actual[1], expected[1]) << numel << ", scale " << on_cpu[1];
                }
            }
        }
    }
}

TEST(Fp8ScaleDevice, ScalesOfManyAmaxesHaveTheBitsOfTheCpuLoops) {
    auto generator = seeded_generator();
    for (const int64_t count : {0, 1, 255, 256, 257, 10'000}) {
        GuardedTensor amax(DType::kFloat32, count, 1), scale(DType::kFloat32, count, 3);
        for (int64_t i = 0; i < count; ++i) {
            // Magnitudes: no sign.
            amax.set(i, random_bits(DType::kFloat32, Values::kAny, generator) & 0x7FFFFFFF);
        }
        const DeviceTensor device_amax(amax);
        for (const ScaleRule& rule : kRules) {
            const DeviceTensor device_scale(scale);
            check(launch_scale(static_cast<const float*>(device_amax.data()), static_cast<float*>(device_scale.data()),
                               count, rule, nullptr));
            scale_cpu(static_cast<const float*>(amax.data()), static_cast<float*>(scale.data()), count, rule);
            EXPECT_TRUE(same_bytes(device_scale.download(scale), scale)) << count;
        }
    }
}

TEST(Fp8DequantizeDevice, EveryCodeHasTheBitsOfTheCpuLoopsOrIsNanOnBoth) {
    for (const int64_t numel : {0, 1, 7, 8, 255, 256, 1000, 8191, 8192, 8193, 100'003}) {
        for (const DType dtype : kInputs) {
            for (const Format format : kFormats) {
                for (const int64_t offset : {0, 1}) {
                    // Overflows fp16, is subnormal, ...
                    for (const float scale_inv : {1.0f, 0.37f, 3e4f, 1e-6f, 1e-40f, INFINITY}) {
                        std::vector<uint8_t> input(numel + offset);
                        for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<uint8_t>(i * 89);
                        const Buffer device_input = upload(input), device_scale_inv(&scale_inv, sizeof(scale_inv));
                        GuardedTensor out(dtype, numel, offset);
                        const DeviceTensor device_out(out);
                        check(launch_dequantize(
                            {reinterpret_cast<const uint8_t*>(device_input.at(offset)), device_out.data(),
                             reinterpret_cast<const float*>(device_scale_inv.at(0)), numel, format, dtype},
                            nullptr));
                        dequantize_cpu({input.data() + offset, out.data(), &scale_inv, numel, format, dtype});
                        EXPECT_TRUE(same_numbers(device_out.download(out), out)) << numel << ", " << scale_inv;
                    }
                }
            }
        }
    }
}

}  // namespace
}  // namespace te_graph::fp8
