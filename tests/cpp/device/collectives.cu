// Collectives of all protocols: all ranks of a group on one device, against sums on the host, bit for bit.
// Where a number is NaN it is NaN on both, of whatever bits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "collective_ranks.h"
#include "collective_reference.h"
#include "collectives/launch_state.cuh"

namespace te_graph::collectives {
namespace {

const testing::Environment* const kDriverSettings = testing::AddGlobalTestEnvironment(new DriverSettings);
constexpr int kWorlds[] = {2, 3, 4, 8};

// NaN in all of a rank's out, and nothing else changed. Of an all-gather, parts of the rank's own piece may be valid.
testing::AssertionResult is_aborted(const Memory& memory, int rank) {
    std::vector<char> actual = memory.download(), expected = memory.host();
    std::fill_n(&expected[memory.out_at(rank)], memory.out_bytes(), static_cast<char>(0xFF));
    if (memory.test_case().protocol == Protocol::kLamportBf16) {
        // What NaN becomes that has been widened is the compiler's choice.
        for (int64_t at = memory.out_at(rank); at < memory.out_at(rank) + memory.out_bytes(); at += sizeof(float)) {
            float value;
            std::memcpy(&value, &actual[at], sizeof value);
            if (std::isnan(value)) std::memset(&actual[at], 0xFF, sizeof value);
        }
    }
    if (memory.test_case().algorithm == Algorithm::kAllGather) {
        const int64_t piece = memory.input_bytes(), own = memory.out_at(rank) + rank * piece;
        for (int64_t i = 0; i < piece; ++i) {
            if (actual[own + i] == memory.host()[memory.input_at(rank) + i]) actual[own + i] = static_cast<char>(0xFF);
        }
    }
    const int64_t begin = memory.begin_of(rank), end = memory.end_of(rank);
    if (std::equal(&actual[begin], &actual[begin] + (end - begin), &expected[begin]))
        return testing::AssertionSuccess();
    return testing::AssertionFailure() << memory.test_case() << ", world " << memory.world() << ": rank " << rank;
}

// Launches.
__global__ void delay_kernel(uint64_t ns) {
    const uint64_t start = now_ns();
    while (now_ns() - start < ns) __nanosleep(1000);
}
void delay(cudaStream_t stream, uint64_t ns) {
    delay_kernel<<<1, 1, 0, stream>>>(ns);
    check(cudaGetLastError());
}

// All ranks together have few enough blocks to be resident at once.
int random_blocks(std::mt19937_64& generator) { return 1 << generator() % 4; }
int random_launch(std::mt19937_64& generator) { return kLaunchIds[generator() % kLaunchIds.size()]; }

void launch(const Ranks& ranks, int rank, const Memory& memory, int blocks, int launch, cudaStream_t stream) {
    Peers peers = ranks.peers(rank);
    std::fill(std::begin(peers.pool), std::end(peers.pool), memory.pool());
    peers.extents = memory.fingerprint().extents;
    const LaunchArgs args = memory.args(rank, blocks, launch);
    check(launcher_of(memory.test_case().protocol)(peers, args, stream));
}
void launch(const Ranks& ranks, int rank, const Memory& memory, std::mt19937_64& generator) {
    launch(ranks, rank, memory, random_blocks(generator), random_launch(generator), ranks[rank].stream());
}
void launch_all(const Ranks& ranks, const Memory& memory, std::mt19937_64& generator) {
    const int first = static_cast<int>(generator() % ranks.world());
    for (int i = 0; i < ranks.world(); ++i) launch(ranks, (first + i) % ranks.world(), memory, generator);
}

void expect_right_at_once(const Ranks& ranks, const Case& now, std::mt19937_64& generator) {
    Memory memory(now, ranks.world());
    refill(memory, generator);
    launch_all(ranks, memory, generator);
    check(cudaDeviceSynchronize());
    ASSERT_TRUE(is_right(memory));
}

TEST(CollectivesDevice, ResultsOfAllSizesAndAlignmentsAreThoseOfTheHost) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        const Ranks ranks(world);
        int operations = 0;
        for (const Algorithm algorithm : kAlgorithms) {
            // Sizes around those of words and lines, whatever the size of an element; primes.
            for (const int64_t numel :
                 {1, 2, 7, 8, 29, 30, 31, 32, 33, 59, 60, 61, 64, 119, 120, 121, 127, 129, 1009, 10007}) {
                for (Case now : cases_of(algorithm, numel)) {
                    for (const bool is_in_place : {false, true}) {
                        for (const int offsets : {0, 2, 1, 3}) {
                            if (is_in_place && offsets % 2 == 1) break;
                            now.is_in_place = is_in_place;
                            now.input_offset = offsets % 2 * now.element_bytes();
                            now.out_offset = offsets / 2 * now.element_bytes();
                            expect_right_at_once(ranks, now, generator);
                            if (HasFatalFailure()) return;
                            ++operations;
                        }
                    }
                }
            }
        }
        ranks.expect_finished(operations);
    }
}

TEST(CollectivesDevice, ResultsOfAMebibyteAreThoseOfTheHost) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        const Ranks ranks(world);
        int operations = 0;
        for (const Algorithm algorithm : kAlgorithms) {
            for (Case now : cases_of(algorithm, 1 << 20)) {
                now.numel /= now.element_bytes();
                now.is_in_place = generator() % 2 == 0;
                now.input_offset = now.out_offset = static_cast<int64_t>(generator() % 2) * now.element_bytes();
                expect_right_at_once(ranks, now, generator);
                if (HasFatalFailure()) return;
                ++operations;
            }
        }
        ranks.expect_finished(operations);
    }
}

TEST(CollectivesDevice, SpecialValuesAreThoseOfTheHost) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        const Ranks ranks(world);
        for (const Algorithm algorithm : kAlgorithms) {
            for (Case now : cases_of(algorithm, 5003)) {
                now.is_special = true;
                expect_right_at_once(ranks, now, generator);
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST(CollectivesDevice, TheSumOfNegativeZerosIsNegativeZero) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        const Ranks ranks(world);
        for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot, Algorithm::kReduceScatter}) {
            for (const Case& now : cases_of(algorithm, 1001)) {
                const uint64_t zero = multi_tensor::format_of(dtype_of(now.element)).sign();
                Memory memory(now, world);
                memory.refill([&](char* place) { std::memcpy(place, &zero, now.element_bytes()); });
                launch_all(ranks, memory, generator);
                check(cudaDeviceSynchronize());
                const std::vector<char> actual = memory.download();
                for (int rank = 0; rank < world; ++rank) {
                    const char* const input = &memory.host()[memory.input_at(0)];
                    ASSERT_TRUE(std::equal(input, input + memory.out_bytes(), &actual[memory.out_at(rank)])) << now;
                }
            }
        }
    }
}

// Operations of all kinds one after another, some ranks late; what is launched is checked at the end alone.
void expect_sequence_is_right(const Ranks& ranks, int operations, std::mt19937_64& generator) {
    std::vector<std::unique_ptr<Memory>> memories;
    for (int i = 0; i < operations; ++i) {
        memories.push_back(std::make_unique<Memory>(random_case(15, generator), ranks.world()));
        refill(*memories.back(), generator);
    }
    for (const auto& memory : memories) {
        if (generator() % 3 == 0) {
            delay(ranks[static_cast<int>(generator() % ranks.world())].stream(), generator() % (2 * kMillisecond));
        }
        launch_all(ranks, *memory, generator);
    }
    check(cudaDeviceSynchronize());
    for (const auto& memory : memories) ASSERT_TRUE(is_right(*memory));
    ranks.expect_finished(operations);
}

TEST(CollectivesDevice, ManyOperationsOneAfterAnotherNeedNoSynchronization) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) expect_sequence_is_right(Ranks(world), 50, generator);
}

TEST(CollectivesDevice, SequenceNumbersBeginAgainBehindTheLastOne) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) expect_sequence_is_right(Ranks(world, kSequences - 10), 20, generator);
}

TEST(CollectivesDevice, CapturedGraphsReplayOnChangedInputs) {
    auto generator = seeded_generator();
    constexpr int kOperations = 6, kReplays = 20;
    for (const int world : kWorlds) {
        const Ranks ranks(world);
        std::vector<std::unique_ptr<Memory>> memories;
        for (int i = 0; i < kOperations; ++i) {
            memories.push_back(std::make_unique<Memory>(random_case(13, generator), world));
        }
        std::vector<std::unique_ptr<CapturedGraph>> graphs;
        for (int rank = 0; rank < world; ++rank) {
            graphs.push_back(std::make_unique<CapturedGraph>(ranks[rank].stream(), [&] {
                for (const auto& memory : memories) {
                    launch(ranks, rank, *memory, generator);
                    delay(ranks[rank].stream(), generator() % (kMillisecond / 4));
                }
            }));
        }
        for (int replay = 0; replay < kReplays; ++replay) {
            for (const auto& memory : memories) refill(*memory, generator);
            for (int rank = 0; rank < world; ++rank) graphs[rank]->launch(ranks[rank].stream());
            check(cudaDeviceSynchronize());
            for (const auto& memory : memories) ASSERT_TRUE(is_right(*memory)) << "replay " << replay;
        }
        ranks.expect_finished(kOperations * kReplays);
    }
}

// A rank has aborted, as all its state shows.
void expect_aborted(const Ranks& ranks, int rank) {
    const FailureRecord& record = ranks[rank].record();
    EXPECT_EQ(record.is_set, 1) << "rank " << rank;
    EXPECT_NE(record.failure, Failure::kNone) << "rank " << rank;
    EXPECT_EQ(ranks[rank].control().failed, 1.0f) << "rank " << rank;
    EXPECT_GE(ranks[rank].abort(), 1u) << "rank " << rank;
    EXPECT_LE(ranks[rank].abort(), static_cast<uint64_t>(ranks.world())) << "rank " << rank;
}

// The operation of rank p was `expected`, and all ranks can say so.
void expect_told(const Ranks& ranks, int p, const Fingerprint& expected) {
    EXPECT_TRUE(ranks[p].record().extents == expected.extents) << "rank " << p;
    for (int rank = 0; rank < ranks.world(); ++rank) {
        EXPECT_TRUE(ranks[rank].signal_pad().extents[p] == expected.extents) << "of rank " << p << " at rank " << rank;
    }
}

TEST(CollectivesFailureDevice, AMissingRankEndsTheOthersAndAllLaterOperations) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        for (const Algorithm algorithm : kAlgorithms) {
            const Ranks ranks(world);
            const int absent = static_cast<int>(generator() % world);
            expect_sequence_is_right(ranks, 2, generator);
            ranks.set_timeout(100 * kMillisecond);
            const std::vector<Case> cases = cases_of(algorithm, 5003);
            Memory memory(cases[generator() % cases.size()], world);
            refill(memory, generator);
            for (int rank = 0; rank < world; ++rank) {
                if (rank != absent) launch(ranks, rank, memory, generator);
            }
            const double seconds = seconds_to_finish();
            EXPECT_GT(seconds, 0.05);
            EXPECT_LT(seconds, 1.0);
            int timeouts = 0;
            for (int rank = 0; rank < world; ++rank) {
                EXPECT_GE(ranks[rank].abort(), 1u) << "rank " << rank;
                if (rank == absent) continue;
                expect_aborted(ranks, rank);
                EXPECT_TRUE(is_aborted(memory, rank));
                const FailureRecord& record = ranks[rank].record();
                EXPECT_EQ(sequence_of(record.expected), 3u);
                EXPECT_EQ(record.expected, flag_of(3, pack(memory.fingerprint()))) << memory.test_case();
                expect_told(ranks, rank, memory.fingerprint());
                if (record.failure == Failure::kTimeout) {
                    ++timeouts;
                    EXPECT_EQ(record.peer, absent);
                    EXPECT_NE(sequence_of(record.seen), 3u);
                } else {
                    EXPECT_EQ(record.failure, Failure::kAbortedByPeer);
                    EXPECT_TRUE(record.peer != rank && record.peer != absent) << record.peer;
                }
            }
            EXPECT_GT(timeouts, 0);
            EXPECT_EQ(ranks[absent].record().is_set, 0);

            // The absent rank, too, ends at once from here on.
            ranks.set_timeout(10000 * kMillisecond);
            Memory later(random_case(12, generator), world);
            refill(later, generator);
            launch_all(ranks, later, generator);
            EXPECT_LT(seconds_to_finish(), 1.0);
            for (int rank = 0; rank < world; ++rank) {
                expect_aborted(ranks, rank);
                EXPECT_TRUE(is_aborted(later, rank));
            }
            EXPECT_EQ(ranks[absent].record().failure, Failure::kAbortedByPeer);
        }
    }
}

// One rank runs `other`, all others `common`: a rank detects it, and all end.
void expect_mismatch(int world, const Case& common, const Case& other, std::mt19937_64& generator) {
    const Ranks ranks(world);
    ranks.set_timeout(5000 * kMillisecond);
    const int odd = static_cast<int>(generator() % world);
    Memory memory(common, world), odd_memory(other, world);
    refill(memory, generator);
    refill(odd_memory, generator);
    for (int rank = 0; rank < world; ++rank) launch(ranks, rank, rank == odd ? odd_memory : memory, generator);
    EXPECT_LT(seconds_to_finish(), 2.0) << common << " and " << other;
    int mismatches = 0;
    for (int rank = 0; rank < world; ++rank) {
        expect_aborted(ranks, rank);
        EXPECT_TRUE(is_aborted(rank == odd ? odd_memory : memory, rank));
        expect_told(ranks, rank, (rank == odd ? odd_memory : memory).fingerprint());
        const FailureRecord& record = ranks[rank].record();
        if (record.failure != Failure::kMismatch) {
            EXPECT_EQ(record.failure, Failure::kAbortedByPeer) << common << " and " << other;
            continue;
        }
        ++mismatches;
        EXPECT_EQ(sequence_of(record.seen), 1u);
        EXPECT_EQ(record.expected, flag_of(1, pack((rank == odd ? odd_memory : memory).fingerprint())));
        EXPECT_EQ(record.seen, flag_of(1, pack((rank == odd ? memory : odd_memory).fingerprint())));
        if (rank != odd) {
            EXPECT_EQ(record.peer, odd) << common << " and " << other << ", world " << world;
        }
    }
    EXPECT_GT(mismatches, 0) << common << " and " << other;
}

TEST(CollectivesFailureDevice, AnotherDimOrShapeOfAsManyElementsIsSeenAndEndsAll) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        for (const Algorithm algorithm : {Algorithm::kReduceScatter, Algorithm::kAllGather}) {
            for (Case now : cases_of(algorithm, 5040)) {
                now.behind = 12;
                Case other = now;
                other.behind = 6;
                expect_mismatch(world, now, other, generator);
                other = now;
                other.dim = 1;
                expect_mismatch(world, now, other, generator);
                std::swap(other.before, other.behind);
                expect_mismatch(world, now, other, generator);
            }
        }
    }
}

TEST(CollectivesFailureDevice, AnotherNumberOfElementsDtypeOrOperationIsSeenAndEndsAll) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        const Case sum{.algorithm = Algorithm::kOneShot, .numel = 5003};
        Case other = sum;
        other.reduction = Reduction::kMax;
        expect_mismatch(world, sum, other, generator);
        other = sum;
        other.element = Element::kBFloat16;
        expect_mismatch(world, sum, other, generator);
        for (const Algorithm algorithm : kAlgorithms) {
            // Thresholds lie between sizes, so ranks that run different operations may use different protocols.
            const Protocol large = algorithm == Algorithm::kAllGather ? Protocol::kSimple : Protocol::kLamport;
            Case now = cases_of(algorithm, 5003)[0];
            for (const int64_t numel : {1, 5002, 10006}) {
                for (const int protocols : {0, 1, 2, 3}) {
                    now.protocol = protocols % 2 == 0 ? Protocol::kLL128 : large;
                    other = now;
                    other.protocol = protocols < 2 ? Protocol::kLL128 : large;
                    other.numel = numel;
                    expect_mismatch(world, now, other, generator);
                }
            }
            now.protocol = Protocol::kLL128;
            now.element = other.element = Element::kFloat32;
            other = now;
            other.algorithm = algorithm == Algorithm::kAllGather ? Algorithm::kOneShot : Algorithm::kAllGather;
            for (const Protocol protocol :
                 {Protocol::kLL128, algorithm == Algorithm::kAllGather ? Protocol::kLamport : Protocol::kSimple}) {
                other.protocol = protocol;
                expect_mismatch(world, now, other, generator);
            }
        }
    }
}

// Two kernels on rank 0, of `blocks` blocks at most.
void expect_two_kernels_end_all(Memory& first, Memory& second, int blocks, std::mt19937_64& generator) {
    const int world = first.world();
    const Ranks ranks(world);
    const Stream second_stream;
    refill(first, generator);
    refill(second, generator);
    const auto some = [&] { return 1 << generator() % std::bit_width(static_cast<unsigned>(blocks)); };
    for (int rank = 1; rank < world; ++rank) delay(ranks[rank].stream(), 200 * kMillisecond);
    launch(ranks, 0, first, some(), 401, ranks[0].stream());
    launch(ranks, 0, second, some(), 577, second_stream.get());
    for (int rank = 1; rank < world; ++rank) {
        launch(ranks, rank, first, some(), random_launch(generator), ranks[rank].stream());
        launch(ranks, rank, second, some(), random_launch(generator), ranks[rank].stream());
    }
    EXPECT_LT(seconds_to_finish(), 1.0);
    EXPECT_EQ(ranks[0].record().failure, Failure::kConcurrentKernels);
    EXPECT_EQ(ranks[0].record().peer, 0);
    for (int rank = 0; rank < world; ++rank) {
        expect_aborted(ranks, rank);
        EXPECT_TRUE(is_aborted(first, rank));
        EXPECT_TRUE(is_aborted(second, rank));
        if (rank > 0) {
            EXPECT_EQ(ranks[rank].record().failure, Failure::kAbortedByPeer);
        }
    }
}

TEST(CollectivesFailureDevice, TwoKernelsOfARankAtOnceAreSeenAndEndAll) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        for (const Algorithm algorithm : kAlgorithms) {
            Memory first(cases_of(algorithm, 5003)[0], world), second(random_case(12, generator), world);
            expect_two_kernels_end_all(first, second, 8, generator);
        }
    }
}

TEST(CollectivesFailureDevice, TwoLongKernelsAtOnceWriteNaNToAllLines) {
    auto generator = seeded_generator();
    for (const int world : kWorlds) {
        const Case now{.algorithm = Algorithm::kTwoShot, .numel = 300007, .protocol = Protocol::kLamport};
        Case other = now;
        other.algorithm = Algorithm::kReduceScatter;
        other.numel /= world;
        Memory first(now, world), second(other, world);
        expect_two_kernels_end_all(first, second, 2, generator);
        expect_two_kernels_end_all(second, first, 2, generator);
    }
}

TEST(CollectivesDevice, BlocksAreAPowerOfTwoEnoughForTheLinesAndNotAboveTheMost) {
    auto generator = seeded_generator();
    EXPECT_EQ(blocks_for_lines(1, kMaxBlocks), 1);
    EXPECT_EQ(blocks_for_lines(int64_t{1} << 40, kMaxBlocks), kMaxBlocks);
    for (int i = 0; i < 10000; ++i) {
        const auto lines = static_cast<int64_t>(1 + generator() % (1ull << generator() % 32));
        const int most = 1 << generator() % 8, blocks = blocks_for_lines(lines, most);
        ASSERT_TRUE(std::has_single_bit(static_cast<unsigned>(blocks))) << blocks;
        ASSERT_LE(blocks, most) << lines << " lines";
        ASSERT_LE(blocks, blocks_for_lines(2 * lines, most)) << lines << " lines";
    }
}

}  // namespace
}  // namespace te_graph::collectives
