// Kernels of the low-latency protocols, LL128 and Lamport, where data shows by itself that it has arrived. The transfer
// of lines is in line_transfer.cuh.
//
// Formula: out = x_0 + x_1 + ... in rank order, in fp32, rounded once (or the maximum, or the concatenation of all x),
// for words of 8 bytes.
// Grid: blocks of up to 1024 threads; a warp transfers four lines of each piece at a time (course.h), a thread 16 bytes
// of each line.
// A thread reads and writes the same words in all phases, so `out` may be `input`.
// Determinism: sums are taken in rank order, so the bits depend on the elements alone, not on size or timing.
// Blocks wait for peers only, never for each other, so they need not all be resident at once.
#pragma once

#include "collectives/course.cuh"
#include "collectives/line_transfer.cuh"

namespace te_graph::collectives {

// Largest block of the kernels without a loop: larger blocks cover more sizes.
template <int kWorld>
constexpr int kUnrolledThreads = kWorld == 2 ? 1024 : 512;
// kUnrolled: lines of a thread; 0: any number, in a loop.
template <typename Proto, int kWorld, int kUnrolled>
constexpr int kMaxThreads = kUnrolled == 0 ? Proto::threads(kWorld) : kUnrolledThreads<kWorld>;

template <typename Proto, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld, bool kTakes>
__device__ __forceinline__ void run_loop(const LaunchArgs& args, const Peers& peers) {
    using Transfer = LineTransfer<Proto, T, kReduction, kAlgorithm, kWorld>;
    constexpr bool kReduces = kAlgorithm != Algorithm::kAllGather,
                   kGathers = kAlgorithm == Algorithm::kTwoShot || !kReduces;
    // Iterations from sending a line to the last that uses it.
    constexpr int kDelay = kAlgorithm == Algorithm::kTwoShot ? 2 * Proto::kDepth : Proto::kDepth;
    constexpr bool kKeepsOwn = Proto::kDepth == 1 && Transfer::kSendsSame;
    Transfer transfer(peers, args);
    Arrival arrival(peers, args.launch);
    Course<kDelay, kTakes> course(peers, args);

    await_predecessor(arrival.prepared() | transfer.prepared(course.line(0)));
    arrival.begin();
    typename Transfer::Outgoing fragments;
    transfer.load(course.line(0), fragments);  // needs no sequence number
    LaunchState state(peers, args.signature, args.launch, arrival);
    transfer.select_half(state);
    transfer.send(state, course.line(0), fragments);
    // After the first data, so that the links are not idle meanwhile.
    Proto::template send_handshakes<kWorld>(peers, state);
    Fragment own = fragments[0];  // operand of the next sum, where that is what was sent last
    transfer.load(course.next_line(), fragments);
    Proto::await_handshakes(peers, state, [] {});
    course.begin();
    for (int rest = kDelay; course.has(0) || --rest >= 0; course.advance()) {
        const Fragment sent = fragments[0];
        if (course.has(0)) {
            transfer.send(state, course.line(0), fragments);
            transfer.load(course.next_line(), fragments);
        }
        if constexpr (kReduces) {
            if (course.has(Proto::kDepth)) {
                const int line = course.line(Proto::kDepth);
                typename Transfer::Received received;
                transfer.poll(line, received);
                transfer.reduce(state, line, kKeepsOwn ? own : transfer.load_own(line), received);
            }
        }
        own = sent;
        if constexpr (kGathers) {
            if (course.has(kDelay)) {
                const int line = course.line(kDelay);
                typename Transfer::Received received;
                if constexpr (kAlgorithm == Algorithm::kTwoShot) {
                    transfer.poll_sums(line, received);
                } else {
                    transfer.poll(line, received);
                }
                transfer.gather(state, line, received);
            }
        }
    }
    state.end();
}

// For operations so small that each thread has at most kUnrolled lines: no loop, since the whole operation takes one or
// two microseconds.
template <typename Proto, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld, int kUnrolled>
__device__ __forceinline__ void run_unrolled(const LaunchArgs& args, const Peers& peers) {
    using Transfer = LineTransfer<Proto, T, kReduction, kAlgorithm, kWorld>;
    Transfer transfer(peers, args);
    Arrival arrival(peers, args.launch);
    const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int step = static_cast<int>(gridDim.x * blockDim.x) / 8;
    await_predecessor(arrival.prepared() | transfer.prepared(first));
    arrival.begin();
    typename Transfer::Outgoing fragments[kUnrolled];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) transfer.load(first + i * step, fragments[i]);
    LaunchState state(peers, args.signature, args.launch, arrival);
    transfer.select_half(state);
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) transfer.send(state, first + i * step, fragments[i]);
    Proto::template send_handshakes<kWorld>(peers, state);
    // A line is polled while the previous one is waited for.
    typename Transfer::Received received[2];
    Proto::await_handshakes(peers, state, [&] { transfer.poll(first, received[0]); });
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
        const int line = first + i * step;
        if (i + 1 < kUnrolled) transfer.poll(line + step, received[(i + 1) % 2]);
        if constexpr (kAlgorithm == Algorithm::kAllGather) {
            transfer.gather(state, line, received[i % 2]);
        } else {
            transfer.reduce(state, line, Transfer::kSendsSame ? fragments[i][0] : transfer.load_own(line),
                            received[i % 2]);
        }
    }
    state.end();
}

// The body of all kernels.
template <typename Proto, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld, int kUnrolled,
          bool kTakes>
__device__ __forceinline__ void run(const LaunchArgs& args, const Peers& peers) {
    if constexpr (kUnrolled == 0) {
        run_loop<Proto, T, kReduction, kAlgorithm, kWorld, kTakes>(args, peers);
    } else {
        run_unrolled<Proto, T, kReduction, kAlgorithm, kWorld, kUnrolled>(args, peers);
    }
}

// Kernels: of a protocol; Kernels::get<kAlgorithm, T, kReduction, kWorld, kUnrolled, kTakes>() is a __global__
// function.
template <typename Kernels, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld>
cudaError_t launch_for_world(const Peers& peers, const LaunchArgs& args, cudaStream_t stream) {
    using Proto = typename Kernels::Proto;
    if constexpr (kAlgorithm != Algorithm::kTwoShot) {
        const auto launch_unrolled = [&]<int kUnrolled>() {
            return launch_early(Kernels::template get<kAlgorithm, T, kReduction, kWorld, kUnrolled, false>(),
                                threads_for(args.count, args.blocks, kUnrolled), peers, args, stream);
        };
        const int64_t lines = static_cast<int64_t>(args.blocks) * kUnrolledThreads<kWorld> / 8;
        constexpr int kMaxUnroll = kWorld == 2 && kAlgorithm != Algorithm::kReduceScatter ? Proto::kMaxUnroll : 1;
        if (args.count <= lines) return launch_unrolled.template operator()<1>();
        if constexpr (kMaxUnroll >= 2) {
            if (args.count <= 2 * lines) return launch_unrolled.template operator()<2>();
        }
        if constexpr (kMaxUnroll >= 4) {
            if (args.count <= 4 * lines) return launch_unrolled.template operator()<4>();
        }
    }
    const int64_t lines = static_cast<int64_t>(args.blocks) * Proto::threads(kWorld) / 8;
    const int64_t iterations = (args.count + lines - 1) / lines;
    // Lines may be claimed only after the handshakes, and one-shot all-reduces are small.
    if constexpr (Proto::kHasHandshake && kAlgorithm != Algorithm::kOneShot) {
        if (iterations >= kManyTurns) {
            return launch_early(Kernels::template get<kAlgorithm, T, kReduction, kWorld, 0, true>(),
                                threads_for(args.count, args.blocks, iterations), peers, args, stream);
        }
    }
    return launch_early(Kernels::template get<kAlgorithm, T, kReduction, kWorld, 0, false>(),
                        threads_for(args.count, args.blocks, iterations), peers, args, stream);
}

template <typename Kernels, typename T, Reduction kReduction, Algorithm kAlgorithm>
cudaError_t launch(const Peers& peers, const LaunchArgs& args, cudaStream_t stream) {
    return peers.world == 2   ? launch_for_world<Kernels, T, kReduction, kAlgorithm, 2>(peers, args, stream)
           : peers.world == 4 ? launch_for_world<Kernels, T, kReduction, kAlgorithm, 4>(peers, args, stream)
           : peers.world == 8 ? launch_for_world<Kernels, T, kReduction, kAlgorithm, 8>(peers, args, stream)
                              : launch_for_world<Kernels, T, kReduction, kAlgorithm, kAnyWorld>(peers, args, stream);
}

// All algorithms but kAllGather.
template <typename Kernels>
cudaError_t launch_reduction(const Peers& peers, const LaunchArgs& args, cudaStream_t stream) {
    return with_reduction(args.element, args.reduction, [&]<typename T, Reduction kReduction>() {
        switch (args.algorithm) {
            case Algorithm::kOneShot:
                return launch<Kernels, T, kReduction, Algorithm::kOneShot>(peers, args, stream);
            case Algorithm::kTwoShot:
                return launch<Kernels, T, kReduction, Algorithm::kTwoShot>(peers, args, stream);
            default:
                return launch<Kernels, T, kReduction, Algorithm::kReduceScatter>(peers, args, stream);
        }
    });
}

}  // namespace te_graph::collectives
