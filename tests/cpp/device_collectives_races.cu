// Blocks that come late by random times, and the negative control: kernels that do not wait are wrong, and seen to be.
#include "collective_reference.h"
#include "race_kernels.h"

namespace te_graph::collectives {
namespace {

const testing::Environment* const kDriverSettings = testing::AddGlobalTestEnvironment(new DriverSettings);
constexpr int kOperations = 200;

// All-reduces of fresh numbers in one step, one after another; how many were wrong on some rank.
int wrong_operations(int world, Way way, Waiting waiting) {
    auto generator = seeded_generator();
    const Ranks ranks(world);
    std::vector<std::unique_ptr<Memory>> memories;
    for (int i = 0; i < kOperations; ++i) {
        const auto numel = static_cast<int64_t>(1 + generator() % 5000);
        memories.push_back(std::make_unique<Memory>(Case{.kind = Kind::kOneStep, .numel = numel, .way = way}, world));
        refill(*memories.back(), generator);
    }
    for (const auto& memory : memories) {
        for (int rank = 0; rank < world; ++rank) {
            const Job job = memory->job(rank, 1 << generator() % 4, kLaunchIds[generator() % kLaunchIds.size()]);
            check(launch_late(ranks.peers(rank), job, way, waiting, ranks[rank].stream()));
        }
    }
    check(cudaDeviceSynchronize());
    int wrong = 0;
    for (const auto& memory : memories) wrong += is_right(*memory) ? 0 : 1;
    return wrong;
}

TEST(CollectivesRacesDevice, LateBlocksChangeNothing) {
    for (const int world : {2, 4, 8}) {
        EXPECT_EQ(wrong_operations(world, Way::kLines, Waiting::kForData), 0) << "world " << world;
        EXPECT_EQ(wrong_operations(world, Way::kWords, Waiting::kForData), 0) << "world " << world;
    }
}

TEST(CollectivesRacesDevice, WhoDoesNotWaitIsWrong) {
    EXPECT_GT(wrong_operations(2, Way::kLines, Waiting::kForNothing), kOperations / 10);
    EXPECT_GT(wrong_operations(2, Way::kWords, Waiting::kForNothing), kOperations / 10);
}

// Inputs are written by the kernel ahead, 30 us after whoever starts early could have read them.
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

TEST(CollectivesRacesDevice, InputsOfTheKernelAheadAreAwaited) {
    ASSERT_TRUE(can_start_early());
    auto generator = seeded_generator();
    for (const int world : {2, 3, 4, 8}) {
        for (const Kind kind : kKinds) {
            const Ranks ranks(world);
            int operations = 0;
            for (const Case& now : cases_of(kind, 5003)) {
                Memory memory(now, world);
                refill(memory, generator);
                const Buffer inputs = move_inputs(memory);
                check(cudaDeviceSynchronize());
                for (int rank = 0; rank < world; ++rank) {
                    write_inputs_late(memory, inputs, rank, ranks[rank].stream());
                    Job job = memory.job(rank, 2, kLaunchIds[generator() % kLaunchIds.size()]);
                    job.starts_early = true;
                    Peers peers = ranks.peers(rank);
                    std::fill(std::begin(peers.pool), std::end(peers.pool), memory.pool());
                    check(launcher_of(now.way)(peers, job, ranks[rank].stream()));
                }
                check(cudaDeviceSynchronize());
                ASSERT_TRUE(is_right(memory));
                ++operations;
            }
            ranks.expect_finished(operations);
        }
    }
}

TEST(CollectivesRacesDevice, WhoDoesNotAwaitTheKernelAheadReadsTooEarly) {
    auto generator = seeded_generator();
    const Ranks ranks(2);
    Memory memory(Case{.kind = Kind::kOneStep, .numel = 5003}, 2);
    refill(memory, generator);
    const Buffer inputs = move_inputs(memory);
    write_inputs_late(memory, inputs, 0, ranks[0].stream());
    Job job = memory.job(0, 1, kLaunchIds[0]);
    job.starts_early = true;
    check(launch_hasty_copy(job, ranks[0].stream()));
    check(cudaDeviceSynchronize());
    const std::vector<char> after = memory.download();
    EXPECT_EQ(after[memory.out_at(0)], 0x3C);
    EXPECT_EQ(after[memory.input_at(0)], memory.host()[memory.input_at(0)]);
}

}  // namespace
}  // namespace te_graph::collectives
