// Kernels of the LL128 protocol (protocols.h, low_latency.cuh).
// Bytes per element, one-shot all-reduce: read twice, received world - 1 times, written once; 128 / 120 of it on the
// wire.
#include "collectives/low_latency.cuh"

namespace te_graph::collectives {
namespace {

// Many blocks of few warps are faster than few blocks of many.
constexpr int kLinesOfSmallBlock = 16;

template <typename T, Reduction kReduction, int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLL128, kWorld, kUnrolled>, 1)
    one_shot_all_reduce_ll128_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<ProtoLL128, T, kReduction, Algorithm::kOneShot, kWorld, kUnrolled>(args, peers);
}

template <typename T, Reduction kReduction, int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLL128, kWorld, kUnrolled>, 1)
    two_shot_all_reduce_ll128_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<ProtoLL128, T, kReduction, Algorithm::kTwoShot, kWorld, kUnrolled>(args, peers);
}

template <typename T, Reduction kReduction, int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLL128, kWorld, kUnrolled>, 1)
    reduce_scatter_ll128_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<ProtoLL128, T, kReduction, Algorithm::kReduceScatter, kWorld, kUnrolled>(args, peers);
}

template <int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLL128, kWorld, kUnrolled>, 1)
    all_gather_ll128_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<ProtoLL128, float, Reduction::kSum, Algorithm::kAllGather, kWorld, kUnrolled>(args, peers);
}

struct LL128Kernels {
    using Proto = ProtoLL128;
    template <Algorithm kAlgorithm, typename T, Reduction kReduction, int kWorld, int kUnrolled>
    static auto get() {
        if constexpr (kAlgorithm == Algorithm::kOneShot) {
            return one_shot_all_reduce_ll128_kernel<T, kReduction, kWorld, kUnrolled>;
        } else if constexpr (kAlgorithm == Algorithm::kTwoShot) {
            return two_shot_all_reduce_ll128_kernel<T, kReduction, kWorld, kUnrolled>;
        } else if constexpr (kAlgorithm == Algorithm::kReduceScatter) {
            return reduce_scatter_ll128_kernel<T, kReduction, kWorld, kUnrolled>;
        } else {
            return all_gather_ll128_kernel<kWorld, kUnrolled>;
        }
    }
};

}  // namespace

int blocks_for_lines(int64_t lines, int max_blocks) {
    int blocks = 1;
    while (blocks < max_blocks && static_cast<int64_t>(blocks) * kLinesOfSmallBlock < lines) blocks *= 2;
    return blocks;
}

cudaError_t launch_ll128(const Peers& peers, const LaunchArgs& args, cudaStream_t stream) {
    const SizedKernel kernel =
        args.algorithm == Algorithm::kAllGather
            ? kernel_of<LL128Kernels, float, Reduction::kSum, Algorithm::kAllGather>(args, peers.world)
            : reduction_kernel_of<LL128Kernels>(args, peers.world);
    const EarlyLaunch launch(args, kernel.threads, stream);
    return cudaLaunchKernelEx(&launch.config, kernel.function, args, peers);
}

bool can_start_early() {
    // The architecture that the code was compiled for, not the device's: code for an older one runs there, too, and
    // does not wait.
    const auto kernel = all_gather_ll128_kernel<kAnyWorld, 0>;
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.ptxVersion >= 90;
    // No code for this device: the first launch reports it.
    static_cast<void>(cudaGetLastError());
    return false;
}

}  // namespace te_graph::collectives
