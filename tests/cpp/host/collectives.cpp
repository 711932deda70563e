// The state of a rank and sequence numbers (rank_state.h), with kernels as random interleavings of their blocks'
// arrivals and departures; the selection of protocols and the division of receive buffers (protocols.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <ostream>
#include <utility>
#include <vector>

#include "collectives/protocols.h"
#include "collectives/rank_state.h"
#include "seed.h"

namespace te_graph::collectives {
namespace {

constexpr uint64_t kSequences = 1ull << kSequenceBits;

int random_launch(std::mt19937_64& generator) { return kLaunchIds[generator() % kLaunchIds.size()]; }

// The state of a rank as its blocks change it.
struct State {
    uint64_t word;

    ArrivalResult arrive(int block, int blocks, int launch) {
        const ArrivalResult arrived = read_state(word, blocks, launch);
        word += arrival(block, blocks, launch);
        return arrived;
    }
    void depart(int blocks) { word += departure(blocks); }
};

// A kernel whose blocks arrive in any order, some when others have departed.
class Kernel {
public:
    Kernel(int blocks, int launch, std::mt19937_64& generator) : blocks_(blocks), launch_(launch) {
        for (int block = 0; block < blocks; ++block) waiting_.push_back(block);
        std::shuffle(waiting_.begin(), waiting_.end(), generator);
    }
    static Kernel random(std::mt19937_64& generator) {
        return {1 << generator() % 8, random_launch(generator), generator};
    }

    int blocks() const { return blocks_; }
    int launch() const { return launch_; }
    bool has_begun() const { return waiting_.size() < static_cast<size_t>(blocks_); }
    bool is_done() const { return waiting_.empty() && inside_ == 0; }
    bool can_arrive() const { return !waiting_.empty(); }
    bool can_depart() const { return inside_ > 0; }

    ArrivalResult arrive(State& state) {
        const int block = waiting_.back();
        waiting_.pop_back();
        ++inside_;
        return state.arrive(block, blocks_, launch_);
    }
    void depart(State& state) {
        --inside_;
        state.depart(blocks_);
    }

private:
    int blocks_, launch_;
    std::vector<int> waiting_;
    int inside_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Kernel& kernel) {
    return out << kernel.blocks() << " blocks of launch " << kernel.launch();
}

// Runs of blocks that stay inside for long, or leave at once.
class Pace {
public:
    explicit Pace(std::mt19937_64& generator) : arrivals_in_16_(1 + generator() % 15) {}
    bool arrives(const Kernel& kernel, std::mt19937_64& generator) const {
        if (!kernel.can_arrive() || !kernel.can_depart()) return kernel.can_arrive();
        return generator() % 16 < arrivals_in_16_;
    }

private:
    uint64_t arrivals_in_16_;
};

// A run of kernels one after another, from `sequence` on.
void expect_consecutive_numbers(uint64_t sequence, int kernels, std::mt19937_64& generator) {
    State state{sequence << kSequenceShift};
    for (int i = 0; i < kernels; ++i) {
        Kernel kernel = Kernel::random(generator);
        const Pace pace(generator);
        while (!kernel.is_done()) {
            if (!pace.arrives(kernel, generator)) {
                kernel.depart(state);
                continue;
            }
            const ArrivalResult arrived = kernel.arrive(state);
            ASSERT_EQ(arrived.sequence, (sequence + i) % kSequences) << kernel;
            ASSERT_TRUE(arrived.is_exclusive) << kernel;
        }
        ASSERT_EQ(state.word, (sequence + i + 1) << kSequenceShift) << kernel;
    }
}

TEST(State, ConsecutiveKernelsHaveConsecutiveNumbersAndAreExclusive) {
    auto generator = seeded_generator();
    for (int run = 0; run < 1000; ++run) expect_consecutive_numbers(generator() % kSequences, 10, generator);
}

TEST(State, NumbersBeginAgainBehindTheLastOne) {
    auto generator = seeded_generator();
    for (int run = 0; run < 300; ++run) expect_consecutive_numbers(kSequences - 5, 10, generator);
}

TEST(State, LargestGridsAndLaunchesStayInsideTheirFields) {
    for (const int block : {0, kMaxBlocks - 1}) {
        // One block comes first, and all are inside at once.
        State state{(kSequences - 1) << kSequenceShift};
        for (int i = 0; i < kMaxBlocks; ++i) {
            const int now = i == 0 ? block : i == block ? 0 : i;
            const ArrivalResult arrived = state.arrive(now, kMaxBlocks, kMaxLaunchId);
            ASSERT_EQ(arrived.sequence, kSequences - 1);
            ASSERT_TRUE(arrived.is_exclusive) << i;
        }
        for (int i = 0; i < kMaxBlocks; ++i) state.depart(kMaxBlocks);
        ASSERT_EQ(state.word, 0u);
    }
}

// The outcome of two concurrent kernels.
struct Mixed {
    bool have_met = false;  // a block of one arrived when the other had begun and was not done
    bool is_seen = false;
    uint64_t word;  // at the end
};
Mixed run_mixed(Kernel first, Kernel second, uint64_t word, std::mt19937_64& generator) {
    State state{word};
    const std::array<Kernel*, 2> kernels = {&first, &second};
    const std::array<Pace, 2> paces = {Pace(generator), Pace(generator)};
    // How many moves a kernel makes before the other one continues.
    const uint64_t longest = uint64_t{1} << generator() % 6;
    Mixed mixed;
    for (int now = 0; !first.is_done() || !second.is_done(); now = 1 - now) {
        for (uint64_t moves = 1 + generator() % longest; moves > 0 && !kernels[now]->is_done(); --moves) {
            if (!paces[now].arrives(*kernels[now], generator)) {
                kernels[now]->depart(state);
                continue;
            }
            mixed.have_met |= kernels[1 - now]->has_begun() && !kernels[1 - now]->is_done();
            mixed.is_seen |= !kernels[now]->arrive(state).is_exclusive;
        }
    }
    mixed.word = state.word;
    return mixed;
}

// Small grids, too, where few blocks have a chance to see.
TEST(State, ConcurrentKernelsAreDetectedAndTheNextNumberIsRight) {
    auto generator = seeded_generator();
    int met = 0;
    for (int run = 0; run < 200000; ++run) {
        const int limit = 1 + static_cast<int>(generator() % 8);
        const int launch = random_launch(generator), other = random_launch(generator);
        if (launch == other) continue;
        const Kernel first(1 << generator() % limit, launch, generator);
        const Kernel second(1 << generator() % limit, other, generator);
        const uint64_t sequence = generator() % 4 == 0 ? kSequences - 1 - generator() % 2 : generator() % kSequences;
        const Mixed mixed = run_mixed(first, second, sequence << kSequenceShift, generator);
        ASSERT_EQ(mixed.word, (sequence + 2) << kSequenceShift) << first << ", " << second;
        ASSERT_EQ(mixed.is_seen, mixed.have_met) << first << ", " << second;
        met += mixed.have_met;
    }
    EXPECT_GT(met, 50000);
}

// All states that a kernel of `blocks` blocks leaves behind while it is under way: so many have arrived, the last block
// among them or not, and so many of them have departed.
template <typename Function>
void for_each_state(int blocks, int launch, const Function& function) {
    for (int arrived = 1; arrived <= blocks; ++arrived) {
        for (const bool has_last : {false, true}) {
            if (arrived == blocks && !has_last) continue;
            State state{1ull << kSequenceShift};
            for (int i = 0; i < arrived; ++i) {
                state.arrive(has_last && i == 0 ? blocks - 1 : i - has_last, blocks, launch);
            }
            for (int departed = 0; departed <= arrived && departed < blocks; ++departed) {
                function(state, arrived, has_last, departed);
                state.depart(blocks);
            }
        }
    }
}

// Each pair of launches, in every state in which they can meet: the first block of the one that comes later sees it.
TEST(State, TheFirstBlockThatMeetsAnotherKernelSeesIt) {
    auto generator = seeded_generator();
    // The smallest ones all with each other, and any others.
    std::vector<std::array<int, 2>> pairs;
    for (int i = 0; i < 256; ++i) pairs.push_back({kLaunchIds[i / 16], kLaunchIds[i % 16]});
    for (int i = 0; i < 300; ++i) pairs.push_back({random_launch(generator), random_launch(generator)});
    for (const auto& [launch, other] : pairs) {
        if (launch == other) continue;
        for (int blocks = 1; blocks <= kMaxBlocks; blocks *= 2) {
            for_each_state(blocks, launch, [&](const State& state, int arrived, bool has_last, int departed) {
                for (int others = 1; others <= kMaxBlocks; others *= 2) {
                    ASSERT_FALSE(read_state(state.word, others, other).is_exclusive)
                        << arrived << " of " << blocks << " blocks of launch " << launch << " have arrived"
                        << (has_last ? ", the last one among them, and " : " and ") << departed
                        << " departed: unseen by the first of " << others << " blocks of launch " << other;
                }
            });
            if (HasFatalFailure()) return;
        }
    }
}

TEST(Units, AreThoseOfTheProtocols) {
    for (const auto& [protocol, bytes] : {std::pair{Protocol::kLL128, 120},
                                          {Protocol::kLamport, 128},
                                          {Protocol::kSimple, 16384},
                                          {Protocol::kLamportBf16, 256}}) {
        EXPECT_EQ(units_in(protocol, 0), 0);
        EXPECT_EQ(units_in(protocol, 1), 1);
        EXPECT_EQ(units_in(protocol, bytes), 1);
        EXPECT_EQ(units_in(protocol, bytes + 1), 2);
        EXPECT_EQ(units_in(protocol, bytes * (int64_t{1} << 48) + 1), (int64_t{1} << 48) + 1);
    }
}

// The sentinel and its replacement are different NaNs of each format.
TEST(Sentinel, IsANaN) {
    for (const uint32_t word : {kSentinelWord, kNanWord}) {
        EXPECT_TRUE(std::isnan(std::bit_cast<float>(word)));
        for (const uint32_t half : {word & 0xFFFF, word >> 16}) {
            EXPECT_TRUE((half & 0x7C00) == 0x7C00 && (half & 0x3FF) != 0) << "fp16";
            EXPECT_TRUE(std::isnan(std::bit_cast<float>(half << 16))) << "bf16";
        }
    }
    EXPECT_NE(kSentinelWord, kNanWord);
    EXPECT_EQ(kSentinelWord & 0xFF, static_cast<uint32_t>(kSentinelByte));
}

TEST(ReceiveBuffer, IsDividedIntoLinesForAllProtocolsWithoutLoss) {
    for (const int64_t slots : {2, 4, 6, 14}) {
        for (const int64_t receive_buffer :
             {int64_t{512} << 10, int64_t{1} << 20, int64_t{128} << 20, int64_t{1} << 40}) {
            const SlotBytes found = divide_receive_buffer(receive_buffer, slots);
            for (const int64_t bytes : {found.ll128, found.data, found.flags}) {
                EXPECT_GE(bytes, kLineBytes);
                EXPECT_EQ(bytes % kLineBytes, 0);
            }
            const int64_t used =
                static_cast<int64_t>(sizeof(SignalPad)) + slots * (found.ll128 + found.data + found.flags);
            EXPECT_GE(units_of_slot(Protocol::kSimple, Algorithm::kAllGather, found) + 1, found.data / kChunkBytes)
                << "flags for all";
            EXPECT_LE(used, receive_buffer);
            EXPECT_GT(used, receive_buffer - slots * kLineBytes);
        }
    }
}

TEST(Threads, SufficeForTheIterationsAndLeaveNoWarpWithoutLines) {
    auto generator = seeded_generator();
    for (int round = 0; round < 100000; ++round) {
        const int blocks = 1 << generator() % 8, most = generator() % 2 == 0 ? 512 : 1024;
        const auto lines = static_cast<int64_t>(1 + generator() % (1ull << generator() % 30));
        const int64_t step = int64_t{blocks} * most / 8, iterations = (lines + step - 1) / step;
        const int threads = threads_for(lines, blocks, iterations);
        ASSERT_TRUE(threads > 0 && threads <= most && threads % 32 == 0) << threads;
        ASSERT_GE(int64_t{blocks} * threads / 8 * iterations, lines);
        ASSERT_LT((threads - 32) / 32 * iterations * blocks * kLinesPerWarp, lines) << "a warp of each block is idle";
        // Indices of lines are counted past the last one by a delay of at most 8 iterations.
        ASSERT_LT(lines + 9 * step, int64_t{1} << 31);
    }
}

// A launch fits into a slot, whatever the thresholds; each block of a Lamport kernel has a line for its handshake.
TEST(Selection, FitsIntoSlots) {
    auto generator = seeded_generator();
    for (int i = 0; i < 100000; ++i) {
        const auto random = [&] { return static_cast<int64_t>(generator() % (1ull << generator() % 40)); };
        const SlotBytes slots =
            divide_receive_buffer((512 << 10) + random(), 2 * (1 + static_cast<int64_t>(generator() % 7)));
        const Tuning tuning{random(), random(), random()};
        const Op op = static_cast<Op>(generator() % 3);
        const int64_t bytes = 1 + random();
        const int world = 2 + static_cast<int>(generator() % 7);
        const Selection selection = select_for(op, bytes, world, slots, tuning);
        ASSERT_GT(selection.count, 0);
        ASSERT_LE(2 * selection.count, int64_t{1} << 30);
        ASSERT_EQ(selection.algorithm == Algorithm::kAllGather, op == Op::kAllGather);
        ASSERT_EQ(selection.algorithm == Algorithm::kTwoShot, op == Op::kAllReduce && bytes > tuning.one_shot_bytes);
        ASSERT_TRUE(selection.protocol != Protocol::kSimple || op == Op::kAllGather);
        ASSERT_TRUE(selection.protocol != Protocol::kLamport || op != Op::kAllGather);
        const int64_t sent = selection.algorithm == Algorithm::kOneShot ? bytes : bytes / world;
        const bool is_large = sent > (op == Op::kAllGather ? tuning.gather_ll128_bytes : tuning.ll128_bytes);
        ASSERT_TRUE(is_large || selection.protocol == Protocol::kLL128);
        if (selection.protocol == Protocol::kSimple) {
            ASSERT_LE(selection.count * kChunkBytes, slots.data);
            ASSERT_LE(selection.count * static_cast<int64_t>(sizeof(uint64_t)), slots.flags);
        } else {
            const bool is_lamport = selection.protocol == Protocol::kLamport;
            ASSERT_LE(slot_bytes_for(selection.algorithm, selection.count), is_lamport ? slots.data : slots.ll128);
            ASSERT_TRUE(!is_lamport || slots.ll128 >= kMaxBlocks * kLineBytes);
        }
        if (op == Op::kAllGather) continue;
        const Selection narrow = select_bf16_for(op, slots);
        ASSERT_EQ(narrow.protocol, Protocol::kLamportBf16);
        ASSERT_EQ(narrow.algorithm, op == Op::kAllReduce ? Algorithm::kTwoShot : Algorithm::kReduceScatter);
        ASSERT_LE(slot_bytes_for(narrow.algorithm, narrow.count), slots.data);
        ASSERT_EQ(narrow.count > 0, slots.ll128 >= kMaxBlocks * kLineBytes);
    }
}

TEST(Slot, HoldsTheLinesAndThoseOfTwoShotsTwice) {
    for (const Algorithm algorithm :
         {Algorithm::kOneShot, Algorithm::kReduceScatter, Algorithm::kAllGather, Algorithm::kTwoShot}) {
        const int64_t times = algorithm == Algorithm::kTwoShot ? 2 : 1;
        EXPECT_EQ(slot_bytes_for(algorithm, 0), 0);
        EXPECT_EQ(slot_bytes_for(algorithm, 1), times * 128);
        EXPECT_EQ(slot_bytes_for(algorithm, int64_t{1} << 32), times * (int64_t{1} << 39));  // beyond 32 bits
    }
}

TEST(State, LaunchNumbersAreDifferentPrimesAboveTheLargestGrid) {
    for (size_t i = 0; i < kLaunchIds.size(); ++i) {
        EXPECT_TRUE(is_prime(kLaunchIds[i]) && kLaunchIds[i] > kMaxBlocks && kLaunchIds[i] <= kMaxLaunchId);
        EXPECT_TRUE(i == 0 || kLaunchIds[i] > kLaunchIds[i - 1]);
    }
}

TEST(Pieces, LieOneBehindTheOtherAndEndWithTheWhole) {
    char memory[100];
    const Pieces<char> pieces{memory, 100, 40, 40};
    for (int p = 0; p < 3; ++p) EXPECT_EQ(pieces.begin(p), memory + 40 * p);
    EXPECT_EQ(pieces.size(0), 40);
    EXPECT_EQ(pieces.size(1), 40);
    EXPECT_EQ(pieces.size(2), 20);
    EXPECT_EQ(pieces.size(3), 0);
    EXPECT_EQ(pieces.size(7), 0);
    const Pieces<char> whole{memory, 100, 0, 100};
    for (int p = 0; p < 8; ++p) {
        EXPECT_EQ(whole.begin(p), memory);
        EXPECT_EQ(whole.size(p), 100);
    }
}

}  // namespace
}  // namespace te_graph::collectives
