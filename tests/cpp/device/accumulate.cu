// The accumulate kernel against the CPU loops, bit for bit, in the very same memory layout.
#include <algorithm>
#include <vector>

#include "device_memory.h"
#include "multi_tensor/exact_sum.h"

namespace te_graph::multi_tensor {
namespace {

// Tensors, the same ones on the device, and a table of each.
struct Problem {
    explicit Problem(const std::vector<Case>& cases, std::mt19937_64& generator) {
        for (const Case& now : cases) {
            sources.push_back(GuardedTensor::random(now.pair.source, now.numel, now.source_offset, generator));
            destinations.push_back(
                GuardedTensor::random(now.pair.destination, now.numel, now.destination_offset, generator));
            modes.push_back(now.mode);
        }
    }

    // Runs the kernel on a copy of the tensors, in a table or as kernel arguments; returns destinations, then sources.
    std::vector<GuardedTensor> run_on_device(bool is_inline = false, const Accumulation& accumulation = {}) const {
        std::vector<DeviceTensor> from, to;
        std::vector<TableEntry> table;
        std::vector<int64_t> numels;
        for (size_t i = 0; i < sources.size(); ++i) {
            from.emplace_back(sources[i]);
            to.emplace_back(destinations[i]);
            numels.push_back(sources[i].numel());
            table.push_back(
                {from[i].data(), to[i].data(), numels[i], sources[i].dtype(), destinations[i].dtype(), modes[i], {}});
        }
        const std::vector<Chunk> chunks = make_chunks(numels);
        const Buffer device_table = upload(table), device_chunks = upload(chunks);
        const TensorTable in_table{reinterpret_cast<const TableEntry*>(device_table.at(0)), 0,
                                   reinterpret_cast<const Chunk*>(device_chunks.at(0)),
                                   static_cast<int64_t>(chunks.size())};
        const TensorTable inlined{.entries = table.data(), .count = static_cast<int64_t>(table.size())};
        check(launch_accumulate(is_inline ? inlined : in_table, accumulation, nullptr));
        check(cudaDeviceSynchronize());

        std::vector<GuardedTensor> results;
        for (size_t i = 0; i < to.size(); ++i) results.push_back(to[i].download(destinations[i]));
        for (size_t i = 0; i < to.size(); ++i) results.push_back(from[i].download(sources[i]));
        return results;
    }

    std::vector<GuardedTensor> run_on_cpu(const Accumulation& accumulation = {}) const {
        std::vector<GuardedTensor> results = destinations;
        results.insert(results.end(), sources.begin(), sources.end());
        std::vector<TableEntry> table;
        for (size_t i = 0; i < modes.size(); ++i) {
            table.push_back(entry_of(results[modes.size() + i], results[i], modes[i]));
        }
        accumulate_cpu({.entries = table.data(), .count = static_cast<int64_t>(table.size())}, accumulation);
        return results;
    }

    std::vector<GuardedTensor> sources, destinations;
    std::vector<Mode> modes;
};

TEST(AccumulateDevice, EveryPairModeSizeAndOffsetGivesTheBitsOfTheCpuLoopsAndWritesNothingElse) {
    auto generator = seeded_generator();
    for (const Case& now : all_cases()) {
        const Problem problem({now}, generator);
        for (const bool is_inline : {false, true}) {
            const auto actual = problem.run_on_device(is_inline), expected = problem.run_on_cpu();
            for (size_t i = 0; i < 2; ++i) ASSERT_TRUE(same_bytes(actual[i], expected[i])) << now;
        }
    }
}

TEST(AccumulateDevice, OneLaunchServesEntriesOfAllPairsAndModes) {
    auto generator = seeded_generator();
    std::vector<Case> cases = all_cases();
    std::shuffle(cases.begin(), cases.end(), generator);
    const Problem problem(cases, generator);
    const auto expected = problem.run_on_cpu();
    for (const bool is_inline : {false, true}) {
        const auto actual = problem.run_on_device(is_inline);
        for (size_t i = 0; i < cases.size(); ++i) {
            EXPECT_TRUE(same_bytes(actual[i], expected[i])) << cases[i];
            EXPECT_TRUE(same_bytes(actual[cases.size() + i], problem.sources[i])) << cases[i];
        }
    }
}

TEST(AccumulateDevice, WithScaleAndZeroedSourcesEntriesOfAllPairsKeepTheirModes) {
    auto generator = seeded_generator();
    const std::vector<Case> cases = all_cases();
    const Problem problem(cases, generator);
    const Accumulation accumulation{.scale = {.value = 0.77}, .zero_source = true};
    const auto expected = problem.run_on_cpu(accumulation);
    for (const bool is_inline : {false, true}) {
        const auto actual = problem.run_on_device(is_inline, accumulation);
        for (size_t i = 0; i < actual.size(); ++i) {
            EXPECT_TRUE(same_bytes(actual[i], expected[i])) << cases[i % cases.size()];
        }
    }
}

TEST(AccumulateDevice, SquaresOfPairsThatOpsDoNotAddSumUpToNan) {
    auto generator = seeded_generator();
    for (const Pair pair : kRarePairs) {
        for (const Mode mode : {Mode::kSkip, Mode::kStore}) {
            const Problem problem({{pair, mode, 257, 0, 0}}, generator);
            uint64_t words[kPartialWords] = {};
            const Buffer partial(words, sizeof(words));
            problem.run_on_device(false, {.sum_squares = reinterpret_cast<uint64_t*>(partial.at(0))});
            partial.read(0, words, sizeof(words));
            const double sum = rounded_sum(words);
            EXPECT_TRUE(mode == Mode::kSkip ? sum == 0 : sum != sum) << sum;
        }
    }
}

TEST(AccumulateDevice, ResultsRepeatBitForBit) {
    auto generator = seeded_generator();
    const Problem problem(all_cases(), generator);
    const auto first = problem.run_on_device();
    for (int run = 0; run < 3; ++run) {
        const auto again = problem.run_on_device();
        for (size_t i = 0; i < first.size(); ++i) ASSERT_TRUE(same_bytes(again[i], first[i]));
    }
}

// GPU and CPU write different NaNs, so any NaN stands for any other, except where bits are stored unchanged.
TEST(AccumulateDevice, EveryBitPatternGivesWhatTheCpuLoopsGive) {
    auto generator = seeded_generator();
    for (const Pair pair : kPairs) {
        for (const Mode mode : {Mode::kStore, Mode::kAdd}) {
            Problem problem({{pair, mode, 1 << 16, 0, 0}}, generator);
            const Format from = format_of(pair.source), to = format_of(pair.destination);
            for (int64_t i = 0; i < 1 << 16; ++i) {
                problem.sources[0].set(i, from.bytes == 2 ? i : generator() >> (64 - 8 * from.bytes));
                problem.destinations[0].set(i, generator() >> (64 - 8 * to.bytes));
            }
            problem.sources[0].set(0, from.infinity() | 1);
            problem.sources[0].set(1, from.infinity() | from.sign());
            problem.destinations[0].set(1, to.infinity());
            problem.sources[0].set(2, from.sign());
            problem.destinations[0].set(2, to.sign());

            const GuardedTensor actual = problem.run_on_device()[0], expected = problem.run_on_cpu()[0];
            const bool unchanged = mode == Mode::kStore && pair.source == pair.destination;
            for (int64_t i = 0; i < 1 << 16; ++i) {
                if (!unchanged && to.is_nan(expected.get(i))) {
                    ASSERT_TRUE(to.is_nan(actual.get(i))) << to.name << ' ' << i;
                } else {
                    ASSERT_EQ(actual.get(i), expected.get(i)) << from.name << " into " << to.name << ' ' << i;
                }
            }
        }
    }
}

TEST(AccumulateDevice, NoChunksMeansNoLaunch) {
    check(launch_accumulate({nullptr, 0}, {}, nullptr));
    check(cudaDeviceSynchronize());
}

// One bf16 tensor of more than 2^31 elements: constant, but for windows around the places where 32 bits run out.
TEST(AccumulateDevice, TensorsOfMoreThanTwoToThe31ElementsAreAddedWholly) {
    constexpr int64_t kNumel = (int64_t{1} << 31) + 3 * kChunkElements + 5;
    constexpr size_t kElement = 2, kPiece = size_t{1} << 26;
    constexpr size_t kBytes = kNumel * kElement, kAllocated = (kBytes / kPiece + 1) * kPiece;
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total));
    if (free < 2 * kAllocated + (size_t{1} << 28)) {
        GTEST_SKIP() << "needs " << 2 * kAllocated << " bytes of GPU memory, " << free << " are free";
    }
    constexpr int kConstant = 0x3E;  // every element is 0x3E3E: 0.186
    const Buffer source(kAllocated), destination(kAllocated);
    source.fill(kConstant);
    destination.fill(kConstant);

    auto generator = seeded_generator();
    struct Window {
        int64_t begin;
        GuardedTensor source, destination;
    };
    std::vector<Window> windows;
    const auto bf16 = DType::kBFloat16;
    for (const int64_t begin : {int64_t{0}, (int64_t{1} << 30) - 16, (int64_t{1} << 31) - 16, kNumel - 32}) {
        windows.push_back(
            {begin, GuardedTensor::random(bf16, 32, 0, generator), GuardedTensor::random(bf16, 32, 0, generator)});
        source.write(begin * kElement, windows.back().source.data(), 32 * kElement);
        destination.write(begin * kElement, windows.back().destination.data(), 32 * kElement);
    }

    const std::vector<TableEntry> table{{source.at(0), destination.at(0), kNumel, bf16, bf16, Mode::kAdd, {}}};
    const std::vector<Chunk> chunks = make_chunks({kNumel});
    const Buffer device_table = upload(table), device_chunks = upload(chunks);
    const TensorTable tensors{reinterpret_cast<const TableEntry*>(device_table.at(0)), 0,
                              reinterpret_cast<const Chunk*>(device_chunks.at(0)), static_cast<int64_t>(chunks.size())};
    check(launch_accumulate(tensors, {}, nullptr));
    check(cudaDeviceSynchronize());

    // All of it: added exactly once up to the last element, and untouched behind it.
    constexpr uint16_t kUnchanged = 0x3E3E, kAdded = 0x3EBE;
    for (Window& window : windows) accumulate_on_cpu({entry_of(window.source, window.destination, Mode::kAdd)});
    std::vector<uint16_t> chunk_view(kPiece / kElement);
    for (size_t byte = 0; byte < kAllocated; byte += kPiece) {
        destination.read(byte, chunk_view.data(), kPiece);
        const auto first = static_cast<int64_t>(byte / kElement);
        const auto count = static_cast<int64_t>(chunk_view.size());
        for (const Window& window : windows) {
            for (int64_t i = 0; i < 32; ++i) {
                const int64_t place = window.begin + i - first;
                if (place < 0 || place >= count) continue;
                ASSERT_EQ(chunk_view[place], window.destination.get(i)) << "element " << first + place;
                chunk_view[place] = kAdded;
            }
        }
        const int64_t inside = std::clamp<int64_t>(kNumel - first, 0, count);
        ASSERT_EQ(std::count(chunk_view.begin(), chunk_view.begin() + inside, kAdded), inside)
            << "from element " << first;
        ASSERT_EQ(std::count(chunk_view.begin() + inside, chunk_view.end(), kUnchanged), count - inside);
    }
}

TEST(UpdateEntriesDevice, GivesTheTableOfTheCpuLoopsForAnyNumberOfUpdates) {
    auto generator = seeded_generator();
    std::vector<TableEntry> table(1500);
    for (TableEntry& entry : table) {
        entry = {reinterpret_cast<const void*>(generator()),
                 reinterpret_cast<void*>(generator()),
                 static_cast<int64_t>(generator()),
                 DType::kFloat16,
                 DType::kFloat32,
                 Mode::kStore,
                 {1, 2, 3, 4, 5}};
    }
    std::vector<int32_t> order(table.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    for (const int64_t count : {0, 1, 127, 128, 129, 256, 1000}) {
        std::shuffle(order.begin(), order.end(), generator);
        std::vector<EntryUpdate> updates;
        for (int64_t i = 0; i < count; ++i) {
            updates.push_back({reinterpret_cast<const void*>(generator()), reinterpret_cast<void*>(generator()),
                               order[i], static_cast<Mode>(generator() % 3), generator() % 2 == 0});
        }
        const Buffer device_table = upload(table);
        std::vector<TableEntry> actual(table.size()), expected = table;
        update_entries_cpu(expected.data(), updates.data(), count);
        check(launch_update_entries(reinterpret_cast<TableEntry*>(device_table.at(0)), updates.data(), count, nullptr));
        // The updates were read before the call returned.
        std::fill(updates.begin(), updates.end(), EntryUpdate{nullptr, nullptr, 0, Mode::kSkip, true});
        device_table.read(0, actual.data(), actual.size() * sizeof(TableEntry));
        EXPECT_EQ(std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(TableEntry)), 0) << count;
    }
}

TEST(AccumulateDevice, ACapturedLaunchFollowsTheTableFromReplayToReplay) {
    auto generator = seeded_generator();
    const auto fp32 = DType::kFloat32;
    const int64_t numel = kChunkElements + 3;
    const auto source = GuardedTensor::random(fp32, numel, 0, generator);
    const auto empty = GuardedTensor::random(fp32, numel, 0, generator);
    const DeviceTensor device_source(source), first(empty), second(empty);
    const std::vector<TableEntry> table{{device_source.data(), nullptr, numel, fp32, fp32, Mode::kSkip, {}}};
    const std::vector<Chunk> chunks = make_chunks({numel});
    const Buffer device_table = upload(table), device_chunks = upload(chunks);
    auto* const entries = reinterpret_cast<TableEntry*>(device_table.at(0));

    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replayable;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const TensorTable tensors{entries, 0, reinterpret_cast<const Chunk*>(device_chunks.at(0)),
                              static_cast<int64_t>(chunks.size())};
    check(launch_accumulate(tensors, {}, stream));
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&replayable, graph, 0));

    GuardedTensor expected[2] = {empty, empty};
    const DeviceTensor* const destinations[2] = {&first, &second};
    struct {
        int destination;
        Mode mode;
    } constexpr kReplays[] = {{0, Mode::kSkip}, {0, Mode::kStore}, {0, Mode::kAdd}, {1, Mode::kAdd}, {1, Mode::kSkip}};
    for (const auto& now : kReplays) {
        const EntryUpdate update{nullptr, destinations[now.destination]->data(), 0, now.mode, false};
        check(launch_update_entries(entries, &update, 1, stream));
        check(cudaGraphLaunch(replayable, stream));
        accumulate_on_cpu({entry_of(source, expected[now.destination], now.mode)});
    }
    check(cudaStreamSynchronize(stream));
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(same_bytes(destinations[i]->download(empty), expected[i])) << i;
    check(cudaGraphExecDestroy(replayable));
    check(cudaGraphDestroy(graph));
    check(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace te_graph::multi_tensor
