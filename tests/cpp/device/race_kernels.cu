#include "collectives/lamport.cuh"
#include "collectives/low_latency.cuh"
#include "race_kernels.h"

namespace te_graph::collectives {
namespace {

// Some blocks of each operation sleep for up to 30 us before they load, and so before they send.
template <typename Proto>
struct LateProto : Proto {
    __device__ static Fragment load(const char* begin, int64_t bytes, int64_t line) {
        // Each rank of each operation has memory of its own.
        uint64_t hash = reinterpret_cast<uint64_t>(begin) / 16;
        hash = (hash * kMaxBlocks + blockIdx.x) * 0x9E3779B97F4A7C15ull;
        const uint64_t start = now_ns(), ns = (hash >> 40) % 8 == 0 ? (hash >> 48) % 30000 : 0;
        while (now_ns() - start < ns) {
        }
        return Proto::load(begin, bytes, line);
    }
};

// Uses the contents of the receive buffer without waiting, and does not wait for handshakes.
template <typename Proto>
struct NoWaitProto : LateProto<Proto> {
    template <typename Poll>
    __device__ static void await_handshakes(const Peers&, LaunchState&, const Poll& poll) {
        poll();
    }
    __device__ static bool is_missing(const Fragment&, uint64_t) { return false; }
};

__global__ void copy_late_kernel(char* to, const char* from, int64_t bytes, uint64_t ns) {
    let_successor_start();
    const uint64_t start = now_ns();
    while (now_ns() - start < ns) {
    }
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

__global__ void copy_without_wait_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers) {
    for (int64_t i = threadIdx.x; i < args.input.bytes; i += blockDim.x) args.out.data[i] = args.input.data[i];
    await_predecessor(1);
}

template <typename P, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<P, kWorld, kUnrolled>, 1)
    race_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<P, T, kReduction, kAlgorithm, kWorld, kUnrolled>(args, peers);
}
template <typename P>
struct RaceKernels {
    using Proto = P;
    template <Algorithm kAlgorithm, typename T, Reduction kReduction, int kWorld, int kUnrolled>
    static auto get() {
        return race_kernel<P, T, kReduction, kAlgorithm, kWorld, kUnrolled>;
    }
};

template <typename Proto>
cudaError_t launch_sum(const Peers& peers, const LaunchArgs& args, cudaStream_t stream) {
    const SizedKernel kernel =
        kernel_of<RaceKernels<Proto>, float, Reduction::kSum, Algorithm::kOneShot>(args, peers.world);
    const EarlyLaunch launch(args, kernel.threads, stream);
    return cudaLaunchKernelEx(&launch.config, kernel.function, args, peers);
}

}  // namespace

cudaError_t launch_late(const Peers& peers, const LaunchArgs& args, Protocol protocol, Waiting waiting,
                        cudaStream_t stream) {
    if (protocol == Protocol::kLL128) {
        return waiting == Waiting::kForData ? launch_sum<LateProto<ProtoLL128>>(peers, args, stream)
                                            : launch_sum<NoWaitProto<ProtoLL128>>(peers, args, stream);
    }
    return waiting == Waiting::kForData ? launch_sum<LateProto<ProtoLamport>>(peers, args, stream)
                                        : launch_sum<NoWaitProto<ProtoLamport>>(peers, args, stream);
}

cudaError_t copy_late(char* to, const char* from, int64_t bytes, uint64_t ns, cudaStream_t stream) {
    copy_late_kernel<<<1, 1024, 0, stream>>>(to, from, bytes, ns);
    return cudaGetLastError();
}

cudaError_t launch_copy_without_wait(const LaunchArgs& args, cudaStream_t stream) {
    const EarlyLaunch launch(args, 256, stream);
    return cudaLaunchKernelEx(&launch.config, copy_without_wait_kernel, args, Peers{});
}

}  // namespace te_graph::collectives
