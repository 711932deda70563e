// Formula: out = x_0 + x_1 + ... in the order of the ranks, in fp32, rounded once (or the largest, or all x one behind the
// other), for words of 8 bytes.
// Grid: blocks of 512 threads; a warp takes four lines of each piece at a time, a thread 16 bytes of each line. A thread
// reads and writes the same words in all steps, so `out` may be `input`.
// Bytes per element: one-step reduce: read twice, received world - 1 times, written once; on the wire 128 / 120 of it.
// Determinism: the order of the sum is that of the ranks, so bits depend on the elements alone, not on size or time.
// Blocks wait for peers only, never for each other, so all need not be resident at once.
#include <algorithm>

#include "collectives/element.cuh"
#include "collectives/lines.cuh"

namespace te_graph::collectives {
namespace {

constexpr int kThreads = 512;
constexpr int kLinesPerBlock = kThreads / 32 * kLinesPerWarp;
// More blocks of few warps are faster than few blocks of many.
constexpr int kLinesOfSmallBlock = 16;
// Of the kernel for what each thread does a line of: wider blocks reach further.
template <int kMost>
constexpr int kOnceThreads = kMost <= 2 ? 1024 : kThreads;

// Turns that a warp sends before it waits for what came of the first one: so the links stay busy while sums are made.
constexpr int kAhead = 4;

// Where a rank finds lines: each sender has a slot, in the order of the ranks. The slots' places do not depend on the
// operation, so ranks that are at different ones see each other's flags.
struct Slots {
    int64_t half;    // of the inbox
    int64_t offset;  // in each slot

    __device__ const char* of(const Peers& peers, int from, int at) const {
        return peers.lines(at) + half + (from < at ? from : from - 1) * peers.line_slot_bytes + offset;
    }
};

// The same part to all peers, each rank beginning behind itself, so that no link has all at once.
__device__ __forceinline__ void send_to_all(const Peers& peers, const Slots& slots, int64_t line, const Part& part,
                                            uint64_t flag) {
    for (int i = 1; i < peers.world; ++i) {
        const int to = peers.rank + i < peers.world ? peers.rank + i : peers.rank + i - peers.world;
        send_part(slots.of(peers, peers.rank, to), line, part, flag);
    }
}

// All peers' parts of a line; whether they came. found[rank] is left alone.
template <int kMost>
__device__ bool collect(const Peers& peers, Turn& turn, const Slots& slots, int64_t line, int64_t lines,
                        Part (&found)[kMost]) {
    if (turn.failed()) return false;
    while (true) {
        bool is_missing = false;
        int missing_peer = 0;
        uint64_t seen = 0;
#pragma unroll
        for (int p = 0; p < kMost; ++p) {
            if (p == peers.rank || p >= peers.world || line >= lines) continue;
            found[p] = look_at_part(slots.of(peers, p, peers.rank), line);
        }
#pragma unroll
        for (int p = 0; p < kMost; ++p) {
            if (p == peers.rank || p >= peers.world || line >= lines) continue;
            if (has_flag() && found[p].second != turn.flag()) {
                is_missing = true;
                missing_peer = p;
                seen = found[p].second;
            }
        }
        if (!__any_sync(~0u, is_missing)) {
            turn.came();
            return true;
        }
        if (!turn.goes_on(is_missing, seen, missing_peer)) return false;
    }
}

// NaN in every float format.
__device__ inline Part poison() { return {~0ull, ~0ull}; }

// What a thread does with a line, by steps.
template <typename T, Reduction kReduction, Steps kSteps, int kMost>
struct Line {
    // Input pieces that are sent: one where all peers get the same.
    static constexpr int kPieces = kSteps == Steps::kScatter || kSteps == Steps::kReduceSend ? kMost : 1;
    using Loaded = Part[kPieces];

    const Peers& peers;
    const Job& job;

    __device__ void load(int64_t line, Loaded& parts) const {
        if (line >= job.count) return;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            if (p < peers.world) parts[p] = load_part(job.input.begin(p), job.input.size(p), line);
        }
    }

    __device__ void send(const Turn& turn, const Slots& slots, int64_t line, const Loaded& parts) const {
        if (line >= job.count) return;
        if constexpr (kSteps == Steps::kSend) {
            const Part part = turn.failed() ? poison() : parts[0];
            store_part(job.out.begin(peers.rank), job.out.size(peers.rank), line, part);
        }
        if (turn.failed()) return;
        if constexpr (kPieces == 1) {
            send_to_all(peers, slots, line, parts[0], turn.flag());
        } else {
#pragma unroll
            for (int p = 0; p < kPieces; ++p) {
                if (p == peers.rank || p >= peers.world) continue;
                send_part(slots.of(peers, peers.rank, p), line, parts[p], turn.flag());
            }
        }
    }

    // This rank's own part of what is summed here.
    __device__ Part own_part(int64_t line) const {
        return line < job.count ? load_part(job.input.begin(peers.rank), job.input.size(peers.rank), line) : Part{};
    }

    // Sends the sum on, where there is a second step.
    __device__ void reduce(Turn& turn, const Slots& slots, const Slots& sums, int64_t line, const Part& own) const {
        Part found[kMost];
        const bool came = collect<kMost>(peers, turn, slots, line, job.count, found);
        if (line >= job.count) return;
        uint64_t first[kMost], second[kMost];
#pragma unroll
        for (int p = 0; p < kMost; ++p) {
            first[p] = p == peers.rank ? own.first : found[p].first;
            second[p] = p == peers.rank ? own.second : found[p].second;
        }
        const Part sum = came ? Part{reduce_words<T, kReduction>(first, peers.world),
                                     reduce_words<T, kReduction>(second, peers.world)}
                              : poison();
        const int piece = kSteps == Steps::kReduceSend ? peers.rank : 0;
        store_part(job.out.begin(piece), job.out.size(piece), line, sum);
        if (kSteps == Steps::kReduceSend && came) send_to_all(peers, sums, line, sum, turn.flag());
    }

    __device__ void gather(Turn& turn, const Slots& slots, int64_t line) const {
        Part found[kMost];
        const bool came = collect<kMost>(peers, turn, slots, line, job.count, found);
        if (line >= job.count) return;
#pragma unroll
        for (int p = 0; p < kMost; ++p) {
            if (p == peers.rank || p >= peers.world) continue;
            store_part(job.out.begin(p), job.out.size(p), line, came ? found[p] : poison());
        }
    }
};

template <typename T, Reduction kReduction, Steps kSteps, int kMost>
__global__ void __launch_bounds__(kThreads)
    lines_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    using Work = Line<T, kReduction, kSteps, kMost>;
    // Turns from sending a line to the last that is done with it.
    constexpr int kDelay = kSteps == Steps::kReduceSend ? 2 * kAhead : kAhead;
    const Work work{peers, job};
    const int64_t first = blockIdx.x * static_cast<int64_t>(kLinesPerBlock) + threadIdx.x / 8;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kLinesPerBlock;
    // The same for all threads of a warp: it votes on what has come.
    const int64_t left = job.count - (first - threadIdx.x % 32 / 8);
    const int64_t turns = left <= 0 ? 0 : (left + step - 1) / step;

    typename Work::Loaded parts;
    work.load(first, parts);  // does not wait for the turn
    Turn turn(peers, job.signature, job.launch);
    const Slots slots{turn.half(peers.line_slot_bytes), 0};
    const Slots sums{turn.half(peers.line_slot_bytes), kSteps == Steps::kReduceSend ? job.count * kLineBytes : 0};
    for (int64_t i = 0; i < turns + kDelay; ++i) {
        if (i < turns) {
            const int64_t line = first + i * step;
            work.send(turn, slots, line, parts);
            work.load(line + step, parts);
        }
        if constexpr (kSteps != Steps::kSend) {
            const int64_t summed = i - kAhead;
            if (0 <= summed && summed < turns) {
                const int64_t line = first + summed * step;
                work.reduce(turn, slots, sums, line, work.own_part(line));
            }
        }
        if constexpr (kSteps == Steps::kReduceSend || kSteps == Steps::kSend) {
            if (i >= kDelay) work.gather(turn, sums, first + (i - kDelay) * step);
        }
    }
    turn.end();
}

// The same for operations so small that each thread has kLines lines at most: no loop, since a microsecond is all there is.
template <typename T, Reduction kReduction, Steps kSteps, int kMost, int kLines>
__global__ void __launch_bounds__(kOnceThreads<kMost>, 1)
    lines_once_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    using Work = Line<T, kReduction, kSteps, kMost>;
    const Work work{peers, job};
    const int64_t first = static_cast<int64_t>(blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int64_t step = static_cast<int64_t>(gridDim.x * blockDim.x) / 8;
    typename Work::Loaded parts[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) work.load(first + i * step, parts[i]);
    Turn turn(peers, job.signature, job.launch);
    const Slots slots{turn.half(peers.line_slot_bytes), 0};
#pragma unroll
    for (int i = 0; i < kLines; ++i) work.send(turn, slots, first + i * step, parts[i]);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        const int64_t line = first + i * step;
        if constexpr (kSteps == Steps::kSend) {
            work.gather(turn, slots, line);
        } else {
            work.reduce(turn, slots, slots, line, Work::kPieces == 1 ? parts[i][0] : work.own_part(line));
        }
    }
    turn.end();
}

template <typename T, Reduction kReduction, Steps kSteps, int kMost, int kLines>
void launch_once(const Peers& peers, const Job& job, cudaStream_t stream) {
    const int64_t warp_lines = static_cast<int64_t>(job.blocks) * kLines * kLinesPerWarp;
    const auto warps = static_cast<int>((job.count + warp_lines - 1) / warp_lines);
    lines_once_kernel<T, kReduction, kSteps, kMost, kLines><<<job.blocks, 32 * warps, 0, stream>>>(job, peers);
}

template <typename T, Reduction kReduction, Steps kSteps, int kMost>
cudaError_t launch_for(const Peers& peers, const Job& job, cudaStream_t stream) {
    if constexpr (kSteps != Steps::kReduceSend) {
        const int64_t lines = static_cast<int64_t>(job.blocks) * kOnceThreads<kMost> / 8;
        constexpr bool kIsAlike = kMost <= 2 && kSteps != Steps::kScatter;
        if (job.count <= lines) {
            launch_once<T, kReduction, kSteps, kMost, 1>(peers, job, stream);
            return cudaGetLastError();
        }
        if (kIsAlike && job.count <= 2 * lines) {
            launch_once<T, kReduction, kSteps, kMost, kIsAlike ? 2 : 1>(peers, job, stream);
            return cudaGetLastError();
        }
        if (kIsAlike && job.count <= 4 * lines) {
            launch_once<T, kReduction, kSteps, kMost, kIsAlike ? 4 : 1>(peers, job, stream);
            return cudaGetLastError();
        }
    }
    lines_kernel<T, kReduction, kSteps, kMost><<<job.blocks, kThreads, 0, stream>>>(job, peers);
    return cudaGetLastError();
}

template <typename T, Reduction kReduction, Steps kSteps>
cudaError_t launch(const Peers& peers, const Job& job, cudaStream_t stream) {
    return peers.world <= 2   ? launch_for<T, kReduction, kSteps, 2>(peers, job, stream)
           : peers.world <= 4 ? launch_for<T, kReduction, kSteps, 4>(peers, job, stream)
                              : launch_for<T, kReduction, kSteps, 8>(peers, job, stream);
}

}  // namespace

int line_blocks_for(int64_t lines, int most) {
    int blocks = 1;
    while (blocks < most && static_cast<int64_t>(blocks) * kLinesOfSmallBlock < lines) blocks *= 2;
    return blocks;
}

cudaError_t launch_lines(const Peers& peers, const Job& job, cudaStream_t stream) {
    if (job.steps == Steps::kSend) return launch<float, Reduction::kSum, Steps::kSend>(peers, job, stream);
    return with_reduction(job.element, job.reduction, [&]<typename T, Reduction kReduction>() {
        return job.steps == Steps::kReduce    ? launch<T, kReduction, Steps::kReduce>(peers, job, stream)
               : job.steps == Steps::kScatter ? launch<T, kReduction, Steps::kScatter>(peers, job, stream)
                                              : launch<T, kReduction, Steps::kReduceSend>(peers, job, stream);
    });
}

}  // namespace te_graph::collectives
