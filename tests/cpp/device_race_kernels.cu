#include "collectives/line_kernels.cuh"
#include "collectives/word_wire.cuh"
#include "race_kernels.h"

namespace te_graph::collectives {
namespace {

// Some blocks of each operation sleep for up to 30 us before they load, and so before they send.
template <typename Wire>
struct LateWire : Wire {
    __device__ static Part load(const char* begin, int64_t bytes, int64_t line) {
        // Each rank of each operation has memory of its own.
        uint64_t hash = reinterpret_cast<uint64_t>(begin) / 16;
        hash = (hash * kMaxBlocks + blockIdx.x) * 0x9E3779B97F4A7C15ull;
        const uint64_t start = now_ns(), ns = (hash >> 40) % 8 == 0 ? (hash >> 48) % 30000 : 0;
        while (now_ns() - start < ns) {
        }
        return Wire::load(begin, bytes, line);
    }
};

// Does not listen for its namesakes.
template <typename Wire>
struct DeafWire : Wire {
    template <typename Look>
    __device__ static void hear_hellos(const Peers&, Turn&, const Look& look) {
        look();
    }
};

// Takes what is there, whoever wrote it and when.
template <typename Wire>
struct HastyWire : DeafWire<LateWire<Wire>> {
    __device__ static bool is_missing(const Part&, uint64_t) { return false; }
};

__global__ void copy_late_kernel(char* to, const char* from, int64_t bytes, uint64_t ns) {
    let_successor_start();
    const uint64_t start = now_ns();
    while (now_ns() - start < ns) {
    }
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

__global__ void hasty_copy_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers) {
    for (int64_t i = threadIdx.x; i < job.input.bytes; i += blockDim.x) job.out.data[i] = job.input.data[i];
    await_predecessor(1);
}

template <typename Wire>
cudaError_t launch_sum(const Peers& peers, const Job& job, cudaStream_t stream) {
    return launch<Wire, float, Reduction::kSum, Steps::kReduce>(peers, job, stream);
}

}  // namespace

cudaError_t launch_late(const Peers& peers, const Job& job, Way way, Waiting waiting, cudaStream_t stream) {
    if (way == Way::kLines) {
        return waiting == Waiting::kForData ? launch_sum<LateWire<LineWire>>(peers, job, stream)
                                            : launch_sum<HastyWire<LineWire>>(peers, job, stream);
    }
    return waiting == Waiting::kForData ? launch_sum<LateWire<WordWire>>(peers, job, stream)
                                        : launch_sum<HastyWire<WordWire>>(peers, job, stream);
}

cudaError_t launch_deaf(const Peers& peers, const Job& job, cudaStream_t stream) {
    return launch<DeafWire<WordWire>, float, Reduction::kSum, Steps::kScatter>(peers, job, stream);
}

cudaError_t copy_late(char* to, const char* from, int64_t bytes, uint64_t ns, cudaStream_t stream) {
    copy_late_kernel<<<1, 1024, 0, stream>>>(to, from, bytes, ns);
    return cudaGetLastError();
}

cudaError_t launch_hasty_copy(const Job& job, cudaStream_t stream) {
    return launch_early(hasty_copy_kernel, 256, Peers{}, job, stream);
}

}  // namespace te_graph::collectives
