// The kernels of operations whose data shows by itself that it has come: by lines, or by words. A Wire is how: what a thread
// has of a line, and how it is loaded, sent, looked at and stored.
//
// Formula: out = x_0 + x_1 + ... in the order of the ranks, in fp32, rounded once (or the largest, or all x one behind the
// other), for words of 8 bytes.
// Grid: blocks of up to 1024 threads; a warp takes four lines of each piece at a time, a thread 16 bytes of each line. A
// thread reads and writes the same words in all steps, so `out` may be `input`.
// Determinism: the order of the sum is that of the ranks, so bits depend on the elements alone, not on size or time.
// Blocks wait for peers only, never for each other, so all need not be resident at once.
#pragma once

#include "collectives/element.cuh"
#include "collectives/lines.cuh"

namespace te_graph::collectives {

// Of the kernel for what each thread does a few lines of: wider blocks reach further.
template <int kMost>
constexpr int kOnceThreads = kMost <= 2 ? 1024 : 512;

// Where a rank finds lines: each sender has a slot, in the order of the ranks. The slots' places do not depend on the
// operation, so ranks that are at different ones see each other's flags.
template <typename Wire>
struct Slots {
    int64_t half;    // of the inbox
    int64_t offset;  // in each slot

    __device__ Slots(const Peers& peers, const Turn& turn, int64_t first_line)
        : half(turn.half(Wire::slot_bytes(peers))), offset(first_line * kLineBytes) {}
    __device__ char* of(const Peers& peers, int from, int at) const {
        return Wire::inbox(peers, at) + half + (from < at ? from : from - 1) * Wire::slot_bytes(peers) + offset;
    }
    // The first of this rank's slots; those of the other senders follow.
    __device__ char* of_peers(const Peers& peers) const { return Wire::inbox(peers, peers.rank) + half + offset; }
};

// Peers in the order in which they are sent to: each rank begins behind itself, for where all sent to one at a time its
// link would be all that is busy.
__device__ __forceinline__ int peer_behind(const Peers& peers, int i) {
    return peers.rank + i < peers.world ? peers.rank + i : peers.rank + i - peers.world;
}
// The same part to all peers.
template <typename Wire>
__device__ __forceinline__ void send_to_all(const Peers& peers, const Slots<Wire>& slots, int64_t line,
                                            const Part& part, uint64_t flag) {
    for (int i = 1; i < peers.world; ++i) {
        Wire::send(slots.of(peers, peers.rank, peer_behind(peers, i)), line, part, flag);
    }
}

// The parts of a line that peers send, in the order of their slots, which is that of their ranks.
template <int kMost>
using Found = Part[kMost - 1];
__device__ __forceinline__ int peer_of_slot(int slot, int rank) { return slot < rank ? slot : slot + 1; }

template <int kMost, typename Wire>
__device__ __forceinline__ void look(const Peers& peers, const Slots<Wire>& slots, int64_t line, int64_t lines,
                                     Found<kMost>& found) {
    const char* const first = slots.of_peers(peers);
#pragma unroll
    for (int i = 0; i < kMost - 1; ++i) {
        if (i < peers.world - 1 && line < lines) found[i] = Wire::look(first + i * Wire::slot_bytes(peers), line);
    }
}

// Looks again until all peers' parts of a line are there, which have been looked at once; whether they came.
template <int kMost, typename Wire>
__device__ bool await(const Peers& peers, Turn& turn, const Slots<Wire>& slots, int64_t line, int64_t lines,
                      Found<kMost>& found) {
    if (turn.failed()) return false;
    while (true) {
        bool is_missing = false;
        int missing_slot = 0;
        uint64_t seen = 0;
#pragma unroll
        for (int i = 0; i < kMost - 1; ++i) {
            if (i < peers.world - 1 && line < lines && Wire::is_missing(found[i], turn.flag())) {
                is_missing = true;
                missing_slot = i;
                seen = Wire::flag_of(found[i]);
            }
        }
        if (!__any_sync(~0u, is_missing)) break;
        if (!turn.goes_on(is_missing, seen, peer_of_slot(missing_slot, peers.rank))) return false;
        look<kMost>(peers, slots, line, lines, found);
    }
    turn.came();
    char* const first = slots.of_peers(peers);
#pragma unroll
    for (int i = 0; i < kMost - 1; ++i) {
        if (i < peers.world - 1 && line < lines) Wire::take(first + i * Wire::slot_bytes(peers), line);
    }
    return true;
}

// NaN in every float format.
__device__ inline Part poison() { return {~0ull, ~0ull}; }

// What a thread does with a line, by steps.
template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kMost>
struct Line {
    static constexpr bool kSendsSame = kSteps == Steps::kReduce || kSteps == Steps::kSend;
    // Of the input, in the order in which they are sent.
    using Loaded = Part[kSendsSame ? 1 : kMost - 1];

    const Peers& peers;
    const Job& job;

    __device__ void load(int64_t line, Loaded& parts) const {
        if (line >= job.count) return;
        if constexpr (kSendsSame) {
            parts[0] = Wire::load(job.input.begin(0), job.input.size(0), line);
        } else {
#pragma unroll
            for (int i = 1; i < kMost; ++i) {
                if (i >= peers.world) continue;
                const int p = peer_behind(peers, i);
                parts[i - 1] = Wire::load(job.input.begin(p), job.input.size(p), line);
            }
        }
    }

    __device__ void send(const Turn& turn, const Slots<Wire>& slots, int64_t line, const Loaded& parts) const {
        if (line >= job.count) return;
        if constexpr (kSteps == Steps::kSend) {
            const Part part = turn.failed() ? poison() : parts[0];
            Wire::store(job.out.begin(peers.rank), job.out.size(peers.rank), line, part);
        }
        if (turn.failed()) return;
        if constexpr (kSendsSame) {
            send_to_all(peers, slots, line, parts[0], turn.flag());
        } else {
#pragma unroll
            for (int i = 1; i < kMost; ++i) {
                if (i >= peers.world) continue;
                Wire::send(slots.of(peers, peers.rank, peer_behind(peers, i)), line, parts[i - 1], turn.flag());
            }
        }
    }

    // This rank's own part of what is summed here.
    __device__ Part own_part(int64_t line) const {
        return line < job.count ? Wire::load(job.input.begin(peers.rank), job.input.size(peers.rank), line) : Part{};
    }

    // Sends the sum on, where there is a second step.
    __device__ void reduce(Turn& turn, const Slots<Wire>& slots, const Slots<Wire>& sums, int64_t line, const Part& own,
                           Found<kMost>& found) const {
        const bool came = await<kMost>(peers, turn, slots, line, job.count, found);
        if (line >= job.count) return;
        uint64_t first[kMost], second[kMost];
#pragma unroll
        for (int p = 0; p < kMost; ++p) {
            // Indices that the compiler knows, so that parts stay in registers.
            const Part& below = found[p < kMost - 1 ? p : kMost - 2];
            const Part& above = found[p > 0 ? p - 1 : 0];
            first[p] = p == peers.rank ? own.first : p < peers.rank ? below.first : above.first;
            second[p] = p == peers.rank ? own.second : p < peers.rank ? below.second : above.second;
        }
        const Part sum = came ? Part{reduce_words<T, kReduction>(first, peers.world),
                                     reduce_words<T, kReduction>(second, peers.world)}
                              : poison();
        const int piece = kSteps == Steps::kReduceSend ? peers.rank : 0;
        Wire::store(job.out.begin(piece), job.out.size(piece), line, sum);
        if (kSteps == Steps::kReduceSend && came) send_to_all(peers, sums, line, sum, turn.flag());
    }

    __device__ void gather(Turn& turn, const Slots<Wire>& slots, int64_t line, Found<kMost>& found) const {
        const bool came = await<kMost>(peers, turn, slots, line, job.count, found);
        if (line >= job.count) return;
#pragma unroll
        for (int i = 0; i < kMost - 1; ++i) {
            if (i >= peers.world - 1) continue;
            const int p = peer_of_slot(i, peers.rank);
            Wire::store(job.out.begin(p), job.out.size(p), line, came ? found[i] : poison());
        }
    }
};

template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kMost>
__global__ void __launch_bounds__(Wire::threads(kMost), 1)
    lines_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    using Work = Line<Wire, T, kReduction, kSteps, kMost>;
    constexpr bool kReduces = kSteps != Steps::kSend, kGathers = kSteps == Steps::kReduceSend || !kReduces;
    // Turns from sending a line to the last that is done with it.
    constexpr int kDelay = kSteps == Steps::kReduceSend ? 2 * Wire::kAhead : Wire::kAhead;
    constexpr bool kKeepsOwn = Wire::kAhead == 1 && Work::kSendsSame;
    const Work work{peers, job};
    const int64_t first = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / 8;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x / 8;
    // The same for all threads of a warp: it votes on what has come.
    const int64_t left = job.count - (first - threadIdx.x % 32 / 8);
    const int64_t turns = left <= 0 ? 0 : (left + step - 1) / step;

    typename Work::Loaded parts;
    Part own{};               // of what is summed next, where that is what was sent last
    work.load(first, parts);  // does not wait for the turn
    Turn turn(peers, job.signature, job.launch);
    Wire::begin(peers, turn);
    const Slots<Wire> slots(peers, turn, 0), sums(peers, turn, kSteps == Steps::kReduceSend ? job.count : 0);
    for (int64_t i = 0; i < turns + kDelay; ++i) {
        const Part sent = parts[0];
        if (i < turns) {
            work.send(turn, slots, first + i * step, parts);
            work.load(first + (i + 1) * step, parts);
        }
        if constexpr (kReduces) {
            const int64_t summed = i - Wire::kAhead;
            if (0 <= summed && summed < turns) {
                const int64_t line = first + summed * step;
                Found<kMost> found;
                const auto look_now = [&] { look<kMost>(peers, slots, line, job.count, found); };
                if (summed == 0) {
                    Wire::look_first(peers, turn, look_now);
                } else {
                    look_now();
                }
                work.reduce(turn, slots, sums, line, kKeepsOwn ? own : work.own_part(line), found);
            }
        }
        own = sent;
        if constexpr (kGathers) {
            if (i >= kDelay) {
                const int64_t line = first + (i - kDelay) * step;
                Found<kMost> found;
                look<kMost>(peers, sums, line, job.count, found);
                work.gather(turn, sums, line, found);
            }
        }
    }
    turn.end();
}

// The same for operations so small that each thread has kLines lines at most: no loop, since a microsecond is all there is.
template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kMost, int kLines>
__global__ void __launch_bounds__(kOnceThreads<kMost>, 1)
    lines_once_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    using Work = Line<Wire, T, kReduction, kSteps, kMost>;
    const Work work{peers, job};
    const int64_t first = static_cast<int64_t>(blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int64_t step = static_cast<int64_t>(gridDim.x * blockDim.x) / 8;
    typename Work::Loaded parts[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) work.load(first + i * step, parts[i]);
    Turn turn(peers, job.signature, job.launch);
    Wire::begin(peers, turn);
    const Slots<Wire> slots(peers, turn, 0);
#pragma unroll
    for (int i = 0; i < kLines; ++i) work.send(turn, slots, first + i * step, parts[i]);
    // A line is looked at while the one before is waited for.
    Found<kMost> found[2];
    Wire::look_first(peers, turn, [&] { look<kMost>(peers, slots, first, job.count, found[0]); });
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        const int64_t line = first + i * step;
        if (i + 1 < kLines) look<kMost>(peers, slots, line + step, job.count, found[(i + 1) % 2]);
        if constexpr (kSteps == Steps::kSend) {
            work.gather(turn, slots, line, found[i % 2]);
        } else {
            work.reduce(turn, slots, slots, line, Work::kSendsSame ? parts[i][0] : work.own_part(line), found[i % 2]);
        }
    }
    turn.end();
}

template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kMost, int kLines>
void launch_once(const Peers& peers, const Job& job, cudaStream_t stream) {
    const int64_t warp_lines = static_cast<int64_t>(job.blocks) * kLines * kLinesPerWarp;
    const auto warps = static_cast<int>((job.count + warp_lines - 1) / warp_lines);
    lines_once_kernel<Wire, T, kReduction, kSteps, kMost, kLines><<<job.blocks, 32 * warps, 0, stream>>>(job, peers);
}

template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kMost>
cudaError_t launch_for(const Peers& peers, const Job& job, cudaStream_t stream) {
    if constexpr (kSteps != Steps::kReduceSend) {
        const int64_t lines = static_cast<int64_t>(job.blocks) * kOnceThreads<kMost> / 8;
        constexpr int kMostLines = kMost <= 2 && kSteps != Steps::kScatter ? Wire::kMostLines : 1;
        if (job.count <= lines) {
            launch_once<Wire, T, kReduction, kSteps, kMost, 1>(peers, job, stream);
            return cudaGetLastError();
        }
        if (kMostLines >= 2 && job.count <= 2 * lines) {
            launch_once<Wire, T, kReduction, kSteps, kMost, kMostLines >= 2 ? 2 : 1>(peers, job, stream);
            return cudaGetLastError();
        }
        if (kMostLines >= 4 && job.count <= 4 * lines) {
            launch_once<Wire, T, kReduction, kSteps, kMost, kMostLines >= 4 ? 4 : 1>(peers, job, stream);
            return cudaGetLastError();
        }
    }
    lines_kernel<Wire, T, kReduction, kSteps, kMost><<<job.blocks, Wire::threads(kMost), 0, stream>>>(job, peers);
    return cudaGetLastError();
}

template <typename Wire, typename T, Reduction kReduction, Steps kSteps>
cudaError_t launch(const Peers& peers, const Job& job, cudaStream_t stream) {
    return peers.world <= 2   ? launch_for<Wire, T, kReduction, kSteps, 2>(peers, job, stream)
           : peers.world <= 4 ? launch_for<Wire, T, kReduction, kSteps, 4>(peers, job, stream)
                              : launch_for<Wire, T, kReduction, kSteps, 8>(peers, job, stream);
}

// Of job.steps but kSend.
template <typename Wire>
cudaError_t launch_reduction(const Peers& peers, const Job& job, cudaStream_t stream) {
    return with_reduction(job.element, job.reduction, [&]<typename T, Reduction kReduction>() {
        return job.steps == Steps::kReduce    ? launch<Wire, T, kReduction, Steps::kReduce>(peers, job, stream)
               : job.steps == Steps::kScatter ? launch<Wire, T, kReduction, Steps::kScatter>(peers, job, stream)
                                              : launch<Wire, T, kReduction, Steps::kReduceSend>(peers, job, stream);
    });
}

}  // namespace te_graph::collectives
