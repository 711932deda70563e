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

// Lines that a thread has under way: more where there are fewer peers.
template <int kMost>
constexpr int kBatch = 8 / kMost;

// The slots of an inbox: one for each peer, in the order of the ranks.
struct Slots {
    int64_t offset;  // of the first one in the inbox
    int64_t bytes;   // of each

    __device__ int64_t of(int from, int at) const { return offset + (from < at ? from : from - 1) * bytes; }
};

// All peers' parts of lines `first`, `first + step`, ...; whether they came. found[i][rank] is left alone.
template <int kMost>
__device__ bool collect(const Peers& peers, Turn& turn, const Slots& slots, int64_t first, int64_t step, int64_t lines,
                        Part (&found)[kBatch<kMost>][kMost]) {
    if (turn.failed()) return false;
    const char* const inbox = peers.inbox[peers.rank];
    while (true) {
        bool is_missing = false;
        int missing_peer = 0;
        uint64_t seen = 0;
#pragma unroll
        for (int i = 0; i < kBatch<kMost>; ++i) {
#pragma unroll
            for (int p = 0; p < kMost; ++p) {
                if (p == peers.rank || p >= peers.world || first + i * step >= lines) continue;
                found[i][p] = look_at_part(inbox + slots.of(p, peers.rank), first + i * step);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch<kMost>; ++i) {
#pragma unroll
            for (int p = 0; p < kMost; ++p) {
                if (p == peers.rank || p >= peers.world || first + i * step >= lines) continue;
                if (has_flag() && found[i][p].second != turn.flag()) {
                    is_missing = true;
                    missing_peer = p;
                    seen = found[i][p].second;
                }
            }
        }
        if (!__any_sync(~0u, is_missing)) return true;
        if (!turn.goes_on(is_missing, seen, missing_peer)) return false;
    }
}

// The same part to all peers, each rank beginning behind itself, so that no link has all at once.
__device__ __forceinline__ void send_to_all(const Peers& peers, const Slots& slots, int64_t line, const Part& part,
                                            uint64_t flag) {
    for (int i = 1; i < peers.world; ++i) {
        const int to = peers.rank + i < peers.world ? peers.rank + i : peers.rank + i - peers.world;
        send_part(peers.inbox[to] + slots.of(peers.rank, to), line, part, flag);
    }
}

template <typename T, Reduction kReduction, Steps kSteps, int kMost>
__global__ void __launch_bounds__(kThreads)
    lines_kernel(const __grid_constant__ Peers peers, const __grid_constant__ LineJob job) {
    constexpr Part kPoison{~0ull, ~0ull};  // NaN in every float format
    Turn turn(peers, job.signature, job.launch);
    const int rank = peers.rank, world = peers.world;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kLinesPerBlock;
    const int64_t begin = blockIdx.x * static_cast<int64_t>(kLinesPerBlock) + threadIdx.x / 32 * kLinesPerWarp;
    const int in_warp = threadIdx.x % 32 / 8;
    const Slots slots{turn.half(), job.lines * kLineBytes};
    const Slots sums{slots.offset + (kSteps == Steps::kSend ? 0 : (world - 1) * slots.bytes), slots.bytes};

    if constexpr (kSteps == Steps::kSend) {
        for (int64_t line = begin + in_warp; line < job.lines; line += step) {
            const Part part = turn.failed() ? kPoison : load_part(job.input.begin(0), job.input.size(0), line);
            if (!turn.failed()) send_to_all(peers, slots, line, part, turn.flag());
            store_part(job.out.begin(rank), job.out.size(rank), line, part);
        }
    } else {
        for (int64_t line = begin + in_warp; line < job.lines && !turn.failed(); line += step) {
            if (job.input.stride == 0) {
                send_to_all(peers, slots, line, load_part(job.input.begin(0), job.input.size(0), line), turn.flag());
                continue;
            }
            for (int i = 1; i < world; ++i) {
                const int to = rank + i < world ? rank + i : rank + i - world;
                send_part(peers.inbox[to] + slots.of(rank, to), line,
                          load_part(job.input.begin(to), job.input.size(to), line), turn.flag());
            }
        }
        for (int64_t base = begin; base < job.lines; base += kBatch<kMost> * step) {
            Part found[kBatch<kMost>][kMost];
            const bool came = collect<kMost>(peers, turn, slots, base + in_warp, step, job.lines, found);
#pragma unroll
            for (int i = 0; i < kBatch<kMost>; ++i) {
                const int64_t line = base + in_warp + i * step;
                if (line >= job.lines) break;
                const Part own = load_part(job.input.begin(rank), job.input.size(rank), line);
                uint64_t first[kMost], second[kMost];
#pragma unroll
                for (int p = 0; p < kMost; ++p) {
                    first[p] = p == rank ? own.first : found[i][p].first;
                    second[p] = p == rank ? own.second : found[i][p].second;
                }
                const Part sum =
                    came ? Part{reduce_words<T, kReduction>(first, world), reduce_words<T, kReduction>(second, world)}
                         : kPoison;
                const int piece = kSteps == Steps::kReduceSend ? rank : 0;
                store_part(job.out.begin(piece), job.out.size(piece), line, sum);
                if constexpr (kSteps == Steps::kReduceSend) {
                    if (came) send_to_all(peers, sums, line, sum, turn.flag());
                }
            }
        }
    }

    if constexpr (kSteps != Steps::kReduce) {
        for (int64_t base = begin; base < job.lines; base += kBatch<kMost> * step) {
            Part found[kBatch<kMost>][kMost];
            const bool came = collect<kMost>(peers, turn, sums, base + in_warp, step, job.lines, found);
#pragma unroll
            for (int i = 0; i < kBatch<kMost>; ++i) {
                const int64_t line = base + in_warp + i * step;
                if (line >= job.lines) break;
#pragma unroll
                for (int p = 0; p < kMost; ++p) {
                    if (p == rank || p >= world) continue;
                    store_part(job.out.begin(p), job.out.size(p), line, came ? found[i][p] : kPoison);
                }
            }
        }
    }
    turn.end();
}

template <typename T, Reduction kReduction, Steps kSteps>
cudaError_t launch(const Peers& peers, const LineJob& job, cudaStream_t stream) {
    const auto kernel = peers.world <= 2   ? lines_kernel<T, kReduction, kSteps, 2>
                        : peers.world <= 4 ? lines_kernel<T, kReduction, kSteps, 4>
                                           : lines_kernel<T, kReduction, kSteps, 8>;
    kernel<<<job.blocks, kThreads, 0, stream>>>(peers, job);
    return cudaGetLastError();
}

}  // namespace

int blocks_for(int64_t lines, int most) {
    int blocks = 1;
    while (blocks < most && static_cast<int64_t>(blocks) * kLinesPerBlock < lines) blocks *= 2;
    return blocks;
}

cudaError_t launch_lines(const Peers& peers, const LineJob& job, cudaStream_t stream) {
    if (job.steps == Steps::kSend) return launch<float, Reduction::kSum, Steps::kSend>(peers, job, stream);
    return with_reduction(job.element, job.reduction, [&]<typename T, Reduction kReduction>() {
        return job.steps == Steps::kReduce ? launch<T, kReduction, Steps::kReduce>(peers, job, stream)
                                           : launch<T, kReduction, Steps::kReduceSend>(peers, job, stream);
    });
}

}  // namespace te_graph::collectives
