// The kernels over lists and tables against the CPU loops, bit for bit: norms, scaling, and all options of
// accumulate.
#include <cmath>
#include <random>

#include "device_memory.h"
#include "multi_tensor/accumulate.h"
#include "multi_tensor/norm.h"
#include "multi_tensor/scale.h"

namespace te_graph::multi_tensor {
namespace {

// Numbers around those at which the kernel arguments are full: 120 and 2000 tensors, 120 and 1328 pairs.
constexpr int kCounts[] = {1, 2, 119, 120, 121, 1327, 1329, 2000, 2001, 4100};

// Tensors of random sizes, empty ones among them, dtypes and alignments: all in one buffer with a copy on the device.
class Problem {
public:
    Problem(int count, std::mt19937_64& generator, bool are_pairs) : are_pairs_(are_pairs) {
        for (int i = 0; i < count; ++i) {
            const Pair pair = kPairs[generator() % std::size(kPairs)];
            const int64_t numel = generator() % 7 == 0 ? 0 : small_or_large(generator);
            const DType source = are_pairs ? pair.source : pair.destination;
            sources_.push_back(place(source, numel, generator));
            destinations_.push_back(place(pair.destination, numel, generator));
        }
        host_.resize(bytes_ / 4);
        // Finite numbers of moderate size in every dtype: no exponent is all ones.
        for (uint32_t& word : host_) word = static_cast<uint32_t>(generator()) & 0xBBBFBBBFu;
        device_ = std::make_unique<Buffer>(host_.data(), bytes_);
    }

    std::vector<TableEntry> host_entries() { return entries(reinterpret_cast<char*>(host_.data())); }
    std::vector<TableEntry> device_entries() const { return entries(device_->at(0)); }

    bool has_equal_memory() const {
        std::vector<uint32_t> now(host_.size());
        device_->read(0, now.data(), bytes_);
        return now == host_;
    }
    // Puts `value` as fp32 into some element of the sources.
    void spoil_source(float value) {
        for (const ChunkView& chunk_view : sources_) {
            if (chunk_view.dtype != DType::kFloat32 || chunk_view.numel == 0) continue;
            std::memcpy(reinterpret_cast<char*>(host_.data()) + chunk_view.offset, &value, sizeof(value));
            device_->write(0, host_.data(), bytes_);
            return;
        }
    }

private:
    struct ChunkView {
        DType dtype;
        int64_t numel;
        size_t offset;
    };
    static int64_t small_or_large(std::mt19937_64& generator) {
        return static_cast<int64_t>(generator() % 20 == 0 ? generator() % (3 * kChunkElements) : generator() % 100);
    }
    ChunkView place(DType dtype, int64_t numel, std::mt19937_64& generator) {
        const size_t bytes = format_of(dtype).bytes;
        bytes_ = (bytes_ + 15) / 16 * 16 + (generator() % 2) * bytes;
        const ChunkView chunk_view{dtype, numel, bytes_};
        bytes_ = (bytes_ + numel * bytes + 3) / 4 * 4;
        return chunk_view;
    }
    std::vector<TableEntry> entries(char* base) const {
        std::vector<TableEntry> result;
        for (size_t i = 0; i < destinations_.size(); ++i) {
            const ChunkView &from = are_pairs_ ? sources_[i] : destinations_[i], &to = destinations_[i];
            result.push_back({base + from.offset, base + to.offset, to.numel, from.dtype, to.dtype, Mode::kAdd, {}});
        }
        return result;
    }

    bool are_pairs_;
    std::vector<ChunkView> sources_, destinations_;
    size_t bytes_ = 0;
    std::vector<uint32_t> host_;
    std::unique_ptr<Buffer> device_;
};

// The list on the device as kernel arguments and as a table.
template <typename Function>
void for_both_tables(const Problem& problem, const Function& function) {
    const std::vector<TableEntry> entries = problem.device_entries();
    function(TensorTable{.entries = entries.data(), .count = static_cast<int64_t>(entries.size())});
    const DeviceWork in_table(entries);
    function(in_table.tensors());
}

TensorTable table_of(const std::vector<TableEntry>& entries) {
    return {.entries = entries.data(), .count = static_cast<int64_t>(entries.size())};
}

TEST(NormDevice, StatesAndNormsHaveTheBitsOfTheCpuLoops) {
    auto generator = seeded_generator();
    for (const int count : kCounts) {
        Problem problem(count, generator, false);
        const std::vector<TableEntry> host = problem.host_entries();
        for (const double p : {0.0, 1.0, 2.0, HUGE_VAL}) {
            double expected = 0;
            uint64_t partial[kPartialWords] = {};
            norm_cpu(table_of(host), p, partial, {&expected, true});
            for_both_tables(problem, [&](const TensorTable& tensors) {
                const Buffer device_partial(kPartialWords * sizeof(uint64_t)), out(sizeof(double));
                device_partial.fill(0);
                double norm = NAN;
                // Twice: the first launch leaves the partial cleared.
                for (int run = 0; run < 2; ++run) {
                    check(launch_norm(tensors, p, reinterpret_cast<uint64_t*>(device_partial.at(0)), {out.at(0), true},
                                      nullptr));
                    out.read(0, &norm, sizeof(norm));
                    ASSERT_EQ(norm, expected) << count << " tensors, p = " << p;
                }
            });
        }
    }
}

TEST(NormDevice, OtherPowersAreCloseToTheCpuLoops) {
    auto generator = seeded_generator();
    Problem problem(300, generator, false);
    for (const double p : {0.5, 3.0}) {
        double expected = 0, norm = 0;
        uint64_t partial[kPartialWords] = {};
        norm_cpu(table_of(problem.host_entries()), p, partial, {&expected, true});
        for_both_tables(problem, [&](const TensorTable& tensors) {
            const Buffer device_partial(kPartialWords * sizeof(uint64_t)), out(sizeof(double));
            device_partial.fill(0);
            check(
                launch_norm(tensors, p, reinterpret_cast<uint64_t*>(device_partial.at(0)), {out.at(0), true}, nullptr));
            out.read(0, &norm, sizeof(norm));
            EXPECT_NEAR(norm / expected, 1, 1e-5) << p;
        });
    }
}

TEST(NormDevice, NormsOfEachTensorHaveTheBitsOfTheCpuLoops) {
    auto generator = seeded_generator();
    for (const int count : kCounts) {
        Problem problem(count, generator, false);
        std::vector<float> expected(count), norms(count, NAN);
        norms_cpu(table_of(problem.host_entries()), 2, {expected.data(), false});
        const Buffer partials(count * kPartialWords * sizeof(uint64_t)), out(count * sizeof(float));
        partials.fill(0xA5);
        const std::vector<TableEntry> entries = problem.device_entries();
        check(launch_norms(table_of(entries), 2, reinterpret_cast<uint64_t*>(partials.at(0)), {out.at(0), false},
                           nullptr));
        out.read(0, norms.data(), count * sizeof(float));
        EXPECT_EQ(norms, expected) << count;
    }
}

TEST(ScaleDevice, ScalesClipsAndZeroesAsTheCpuLoopsAndWritesNothingElse) {
    auto generator = seeded_generator();
    for (const int count : kCounts) {
        for (const double factor : {1.0, 0.37}) {
            Problem problem(count, generator, false);
            const Scaling scaling{.scale = {.value = factor}};
            for_both_tables(problem, [&](const TensorTable& tensors) {
                check(launch_scale(tensors, scaling, nullptr));
                scale_cpu(table_of(problem.host_entries()), scaling);
                ASSERT_TRUE(problem.has_equal_memory()) << count;
            });
        }
        Problem problem(count, generator, false);
        const float norm = 3;
        const Buffer device_norm(&norm, sizeof(norm));
        for_both_tables(problem, [&](const TensorTable& tensors) {
            for (const double max_norm : {5.0, 2.0}) {
                check(launch_scale(tensors, {{device_norm.at(0)}, true, max_norm, kClipEps, nullptr}, nullptr));
                scale_cpu(table_of(problem.host_entries()), {{&norm}, true, max_norm, kClipEps, nullptr});
                ASSERT_TRUE(problem.has_equal_memory()) << count;
            }
            check(launch_zero(tensors, nullptr));
            zero_cpu(table_of(problem.host_entries()));
            ASSERT_TRUE(problem.has_equal_memory()) << count;
        });
    }
}

TEST(AccumulateDevice, EveryOptionGivesTheMemoryAndTheFlagsOfTheCpuLoops) {
    auto generator = seeded_generator();
    for (const int count : kCounts) {
        for (int options = 0; options < 32; ++options) {
            if (count > 200 && options % 5 != 0) continue;
            Problem problem(count, generator, true);
            if (options & 16) problem.spoil_source(INFINITY);
            uint64_t partial[kPartialWords] = {}, device_words[kPartialWords];
            float found_inf = 0, noop = 0, device_found_inf = -1;
            const Buffer device_partial(partial, sizeof(partial)), device_flag(&found_inf, sizeof(float));
            const Buffer device_noop(&noop, sizeof(float));
            Accumulation on_cpu;
            if (options & 1) on_cpu.scale.value = 0.77;
            on_cpu.zero_source = options & 2;
            on_cpu.has_mode = true;
            on_cpu.mode = options & 4 ? Mode::kStore : Mode::kAdd;
            on_cpu.found_inf = &found_inf;
            on_cpu.noop = &noop;
            if (options & 8) on_cpu.sum_squares = partial;
            Accumulation on_device = on_cpu;
            on_device.found_inf = reinterpret_cast<float*>(device_flag.at(0));
            on_device.noop = reinterpret_cast<float*>(device_noop.at(0));
            if (options & 8) on_device.sum_squares = reinterpret_cast<uint64_t*>(device_partial.at(0));
            for_both_tables(problem, [&](const TensorTable& tensors) {
                check(launch_accumulate(tensors, on_device, nullptr));
                accumulate_cpu(table_of(problem.host_entries()), on_cpu);
                ASSERT_TRUE(problem.has_equal_memory()) << count << " pairs, options " << options;
                device_flag.read(0, &device_found_inf, sizeof(float));
                ASSERT_EQ(device_found_inf, found_inf);
                device_partial.read(0, device_words, sizeof(device_words));
                // Limbs may be distributed otherwise; the number is the same.
                uint64_t words[kPartialWords];
                std::copy_n(partial, kPartialWords, words);
                const double expected = rounded_sum(words), sum = rounded_sum(device_words);
                ASSERT_TRUE(sum == expected || (sum != sum && expected != expected));
            });
            const float set = 1;
            device_noop.write(0, &set, sizeof(set));
            check(launch_accumulate(DeviceWork(problem.device_entries()).tensors(), on_device, nullptr));
            check(cudaDeviceSynchronize());
            ASSERT_TRUE(problem.has_equal_memory()) << "noop";
        }
    }
}

}  // namespace
}  // namespace te_graph::multi_tensor
