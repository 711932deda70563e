// Kernels of the Lamport protocol that send fp32 tensors as bf16 (protocols.h, low_latency.cuh).
// Formula: out = (bf16(x_0) + bf16(x_1) + ...) * scale in rank order, in fp32; of an all-reduce rounded to bf16, since
// its sums are sent, so that all ranks have the same bits.
// Bytes per element: 4 read, 4 written, and 2 received and 2 cleared for each peer. Rounding is a part of the load.
#include "collectives/lamport.cuh"

namespace te_graph::collectives {
namespace {

// A word of a line has four elements, which are 16 bytes of the tensor.
struct ProtoLamportBf16 : ProtoLamport {
    using Narrow = Packed<__nv_bfloat16, 4>;
    using Wide = Packed<float, 4>;
    static constexpr bool kNarrows = true;

    __device__ static int64_t lane_offset(int64_t line) { return 2 * ProtoLamport::lane_offset(line); }
    // Never a sentinel: all NaNs are rounded to one.
    __device__ static Fragment load(const char* begin, int64_t bytes, int64_t line) {
        const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
        const int64_t offset = lane_offset(line), left = bytes - offset;
        return {load_narrow(begin + offset, left, is_aligned), load_narrow(begin + offset + 16, left - 16, is_aligned)};
    }
    __device__ static void store(char* begin, int64_t bytes, int64_t line, const Fragment& fragment) {
        store_sums(begin, bytes, line, {widen_word(fragment.first), widen_word(fragment.second)});
    }
    __device__ static void store_sums(char* begin, int64_t bytes, int64_t line, const Wide (&sums)[2]) {
        const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
        const int64_t offset = lane_offset(line), left = bytes - offset;
        store_wide(begin + offset, left, is_aligned, sums[0]);
        store_wide(begin + offset + 16, left - 16, is_aligned, sums[1]);
    }

private:
    __device__ static uint64_t load_narrow(const char* address, int64_t left, bool is_aligned) {
        const Vector words = is_aligned && left >= 16
                                 ? *reinterpret_cast<const Vector*>(address)
                                 : Vector{load_odd_word(address, left), load_odd_word(address + 8, left - 8)};
        const auto wide = __builtin_bit_cast(Wide, words);
        Narrow narrowed;
#pragma unroll
        for (int i = 0; i < 4; ++i) narrowed.values[i] = narrow<__nv_bfloat16>(wide.values[i]);
        return __builtin_bit_cast(uint64_t, narrowed);
    }
    __device__ static Wide widen_word(uint64_t word) {
        const auto narrowed = __builtin_bit_cast(Narrow, word);
        Wide wide;
#pragma unroll
        for (int i = 0; i < 4; ++i) wide.values[i] = widen(narrowed.values[i]);
        return wide;
    }
    __device__ static void store_wide(char* address, int64_t left, bool is_aligned, const Wide& wide) {
        const auto words = __builtin_bit_cast(Vector, wide);
        if (is_aligned && left >= 16) {
            *reinterpret_cast<Vector*>(address) = words;
        } else {
            store_odd_word(address, left, words.first);
            store_odd_word(address + 8, left - 8, words.second);
        }
    }
};

template <int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLamportBf16, kWorld, kUnrolled>, 1)
    two_shot_all_reduce_lamport_bf16_kernel(const __grid_constant__ LaunchArgs args,
                                            const __grid_constant__ Peers peers) {
    run<ProtoLamportBf16, __nv_bfloat16, Reduction::kSum, Algorithm::kTwoShot, kWorld, kUnrolled>(args, peers);
}

template <int kWorld, int kUnrolled>
__global__ void __launch_bounds__(kMaxThreads<ProtoLamportBf16, kWorld, kUnrolled>, 1)
    reduce_scatter_lamport_bf16_kernel(const __grid_constant__ LaunchArgs args, const __grid_constant__ Peers peers) {
    run<ProtoLamportBf16, __nv_bfloat16, Reduction::kSum, Algorithm::kReduceScatter, kWorld, kUnrolled>(args, peers);
}

struct LamportBf16Kernels {
    using Proto = ProtoLamportBf16;
    template <Algorithm kAlgorithm, typename T, Reduction kReduction, int kWorld, int kUnrolled>
    static auto get() {
        if constexpr (kAlgorithm == Algorithm::kTwoShot) {
            return two_shot_all_reduce_lamport_bf16_kernel<kWorld, kUnrolled>;
        } else {
            return reduce_scatter_lamport_bf16_kernel<kWorld, kUnrolled>;
        }
    }
};

template <Algorithm kAlgorithm>
SizedKernel kernel_for(const LaunchArgs& args, int world) {
    return kernel_of<LamportBf16Kernels, __nv_bfloat16, Reduction::kSum, kAlgorithm>(args, world);
}

}  // namespace

cudaError_t launch_lamport_bf16(const Peers& peers, const LaunchArgs& args, cudaStream_t stream) {
    const SizedKernel kernel = args.algorithm == Algorithm::kTwoShot
                                   ? kernel_for<Algorithm::kTwoShot>(args, peers.world)
                                   : kernel_for<Algorithm::kReduceScatter>(args, peers.world);
    const EarlyLaunch launch(args, kernel.threads, stream);
    return cudaLaunchKernelEx(&launch.config, kernel.function, args, peers);
}

}  // namespace te_graph::collectives
