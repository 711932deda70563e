// Kernels of the Lamport protocol (protocols.h, low_latency.cuh).
// Bytes per element, one-shot all-reduce: read twice, received and cleared world - 1 times, written once.
#include "collectives/lamport.cuh"
#include "collectives/low_latency.cuh"

namespace te_graph::collectives {
namespace {

template <typename T, Reduction kReduction, int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLamport, kWorld, kUnrolled>, 1)
    one_shot_all_reduce_lamport_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<ProtoLamport, T, kReduction, Algorithm::kOneShot, kWorld, kUnrolled>(args, peers);
}

template <typename T, Reduction kReduction, int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLamport, kWorld, kUnrolled>, 1)
    two_shot_all_reduce_lamport_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<ProtoLamport, T, kReduction, Algorithm::kTwoShot, kWorld, kUnrolled>(args, peers);
}

template <typename T, Reduction kReduction, int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLamport, kWorld, kUnrolled>, 1)
    reduce_scatter_lamport_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<ProtoLamport, T, kReduction, Algorithm::kReduceScatter, kWorld, kUnrolled>(args, peers);
}

struct LamportKernels {
    using Proto = ProtoLamport;
    template <Algorithm kAlgorithm, typename T, Reduction kReduction, int kWorld, int kUnrolled>
    static auto get() {
        if constexpr (kAlgorithm == Algorithm::kOneShot) {
            return one_shot_all_reduce_lamport_kernel<T, kReduction, kWorld, kUnrolled>;
        } else if constexpr (kAlgorithm == Algorithm::kTwoShot) {
            return two_shot_all_reduce_lamport_kernel<T, kReduction, kWorld, kUnrolled>;
        } else {
            return reduce_scatter_lamport_kernel<T, kReduction, kWorld, kUnrolled>;
        }
    }
};

}  // namespace

cudaError_t launch_lamport(const Peers& peers, const LaunchArgs& args, cudaStream_t stream) {
    const SizedKernel kernel = reduction_kernel_of<LamportKernels>(args, peers.world);
    const EarlyLaunch launch(args, kernel.threads, stream);
    return cudaLaunchKernelEx(&launch.config, kernel.function, args, peers);
}

}  // namespace te_graph::collectives
