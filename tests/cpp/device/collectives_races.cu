// Blocks delayed by random times, and the negative control: kernels that do not wait give wrong results.
#include <bit>

#include "collective_reference.h"
#include "race_kernels.h"

namespace te_graph::collectives {
namespace {

const testing::Environment* const kDriverSettings = testing::AddGlobalTestEnvironment(new DriverSettings);
constexpr int kOperations = 200;

// One-shot all-reduces of fresh numbers, one after another; how many were wrong on some rank.
int wrong_operations(int world, Protocol protocol, Waiting waiting) {
    auto generator = seeded_generator();
    const Ranks ranks(world);
    std::vector<std::unique_ptr<Memory>> memories;
    for (int i = 0; i < kOperations; ++i) {
        const auto numel = static_cast<int64_t>(1 + generator() % 5000);
        memories.push_back(std::make_unique<Memory>(
            Case{.algorithm = Algorithm::kOneShot, .numel = numel, .protocol = protocol}, world));
        refill(*memories.back(), generator);
    }
    for (const auto& memory : memories) {
        for (int rank = 0; rank < world; ++rank) {
            const LaunchArgs args =
                memory->args(rank, 1 << generator() % 4, kLaunchIds[generator() % kLaunchIds.size()]);
            check(launch_late(ranks.peers(rank), args, protocol, waiting, ranks[rank].stream()));
        }
    }
    check(cudaDeviceSynchronize());
    int wrong = 0;
    for (const auto& memory : memories) wrong += is_right(*memory) ? 0 : 1;
    return wrong;
}

TEST(CollectivesRacesDevice, LateBlocksChangeNothing) {
    for (const int world : {2, 4, 8}) {
        EXPECT_EQ(wrong_operations(world, Protocol::kLL128, Waiting::kForData), 0) << "world " << world;
        EXPECT_EQ(wrong_operations(world, Protocol::kLamport, Waiting::kForData), 0) << "world " << world;
    }
}

TEST(CollectivesRacesDevice, KernelsThatDoNotWaitAreWrong) {
    EXPECT_GT(wrong_operations(2, Protocol::kLL128, Waiting::kForNothing), kOperations / 10);
    EXPECT_GT(wrong_operations(2, Protocol::kLamport, Waiting::kForNothing), kOperations / 10);
}

// Inputs are written by the predecessor, 30 us after a kernel that starts early could have read them.
void write_inputs_late(const Memory& memory, const Buffer& inputs, int rank, cudaStream_t stream) {
    check(copy_late(memory.pool() + memory.input_at(rank), inputs.at(memory.input_at(rank)), memory.input_bytes(),
                    30000, stream));
}
// All that is on the device, which then has other numbers.
Buffer move_inputs(Memory& memory) {
    const std::vector<char> bytes = memory.host();
    Buffer inputs(bytes.size());
    inputs.write(0, bytes.data(), bytes.size());
    for (int rank = 0; rank < memory.world(); ++rank) {
        check(cudaMemset(memory.pool() + memory.input_at(rank), 0x3C, memory.input_bytes()));
    }
    return inputs;
}

TEST(CollectivesRacesDevice, InputsOfThePredecessorAreAwaited) {
    ASSERT_TRUE(can_start_early());
    auto generator = seeded_generator();
    for (const int world : {2, 3, 4, 8}) {
        for (const Algorithm algorithm : kAlgorithms) {
            const Ranks ranks(world);
            int operations = 0;
            for (const Case& now : cases_of(algorithm, 5003)) {
                Memory memory(now, world);
                refill(memory, generator);
                const Buffer inputs = move_inputs(memory);
                check(cudaDeviceSynchronize());
                for (int rank = 0; rank < world; ++rank) {
                    write_inputs_late(memory, inputs, rank, ranks[rank].stream());
                    LaunchArgs args = memory.args(rank, 2, kLaunchIds[generator() % kLaunchIds.size()]);
                    args.starts_early = true;
                    Peers peers = ranks.peers(rank);
                    std::fill(std::begin(peers.pool), std::end(peers.pool), memory.pool());
                    check(launcher_of(now.protocol)(peers, args, ranks[rank].stream()));
                }
                check(cudaDeviceSynchronize());
                ASSERT_TRUE(is_right(memory));
                ++operations;
            }
            ranks.expect_finished(operations);
        }
    }
}

// Whether a kernel starts in time is the GPU's affair, which other processes may use as well: one of many does.
TEST(CollectivesRacesDevice, AKernelThatDoesNotAwaitItsPredecessorReadsTooEarly) {
    auto generator = seeded_generator();
    const Ranks ranks(2);
    Memory memory(Case{.algorithm = Algorithm::kOneShot, .numel = 5003}, 2);
    int too_early = 0;
    for (int i = 0; i < 50; ++i) {
        refill(memory, generator);
        const Buffer inputs = move_inputs(memory);
        write_inputs_late(memory, inputs, 0, ranks[0].stream());
        LaunchArgs args = memory.args(0, 1, kLaunchIds[0]);
        args.starts_early = true;
        check(launch_copy_without_wait(args, ranks[0].stream()));
        check(cudaDeviceSynchronize());
        const std::vector<char> after = memory.download();
        too_early += after[memory.out_at(0)] == 0x3C;
        EXPECT_EQ(after[memory.input_at(0)], memory.host()[memory.input_at(0)]);
    }
    EXPECT_GT(too_early, 0);
}

// A reduce-scatter of two ranks in eight iterations. The blocks of one rank are all resident; those of the other one
// only in part, until blocks of the first have completed.
class Crowd {
public:
    Crowd()
        : memory_({.algorithm = Algorithm::kReduceScatter, .numel = blocks_ * kNumel, .protocol = Protocol::kLamport},
                  2) {}
    Memory& memory() { return memory_; }
    void launch(const Ranks& ranks, int first, std::mt19937_64& generator) {
        refill(memory_, generator);
        for (const int rank : {first, 1 - first}) {
            const LaunchArgs args = memory_.args(rank, blocks_, kLaunchIds[generator() % kLaunchIds.size()]);
            check(launch_lamport(ranks.peers(rank), args, ranks[rank].stream()));
        }
        check(cudaDeviceSynchronize());
    }

private:
    // Of a block of 1024 threads in seven and a half iterations: 128 lines of 32 numbers each.
    static constexpr int64_t kNumel = 128 * 32 * 15 / 2;
    // As many as are resident of one rank, but not of both.
    static int blocks() {
        int multiprocessors = 0;
        check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
        const int blocks = std::min<int>(kMaxBlocks, std::bit_floor(static_cast<unsigned>(multiprocessors) - 1));
        EXPECT_GT(2 * blocks, multiprocessors);
        return blocks;
    }

    const int blocks_ = blocks();
    Memory memory_;
};

TEST(CollectivesRacesDevice, BlocksThatAreNotResidentComplete) {
    auto generator = seeded_generator();
    const Ranks ranks(2);
    Crowd crowd;
    for (int operation = 0; operation < 4; ++operation) {
        crowd.launch(ranks, operation % 2, generator);
        ASSERT_TRUE(is_right(crowd.memory()));
    }
    ranks.expect_finished(4);
}

}  // namespace
}  // namespace te_graph::collectives
