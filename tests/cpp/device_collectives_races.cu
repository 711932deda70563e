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

}  // namespace
}  // namespace te_graph::collectives
