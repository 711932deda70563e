// Bytes per element: one-step reduce: read twice, received world - 1 times, written once; on the wire 128 / 120 of it.
#include "collectives/line_kernels.cuh"
#include "collectives/line_wire.cuh"

namespace te_graph::collectives {
namespace {

// More blocks of few warps are faster than few blocks of many.
constexpr int kLinesOfSmallBlock = 16;

}  // namespace

int line_blocks_for(int64_t lines, int most) {
    int blocks = 1;
    while (blocks < most && static_cast<int64_t>(blocks) * kLinesOfSmallBlock < lines) blocks *= 2;
    return blocks;
}

cudaError_t launch_lines(const Peers& peers, const Job& job, cudaStream_t stream) {
    if (job.steps != Steps::kSend) return launch_reduction<LineWire>(peers, job, stream);
    return launch<LineWire, float, Reduction::kSum, Steps::kSend>(peers, job, stream);
}

bool can_start_early() {
    // Of the architecture that the code was compiled for, not the device's: older code runs there, too, and does not
    // wait.
    const auto kernel = lines_kernel<LineWire, float, Reduction::kSum, Steps::kSend, kAnyWorld, false>;
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.ptxVersion >= 90;
    // No code for this device: the first launch says so.
    static_cast<void>(cudaGetLastError());
    return false;
}

}  // namespace te_graph::collectives
