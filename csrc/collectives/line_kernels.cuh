// The kernels of operations whose data shows by itself that it has come: by lines, or by words. A Wire is how: what a
// thread has of a line, and how it is loaded, sent, looked at and stored.
//
// Formula: out = x_0 + x_1 + ... in the order of the ranks, in fp32, rounded once (or the largest, or all x one behind
// the other), for words of 8 bytes.
// Grid: blocks of up to 1024 threads; a warp takes four lines of each piece at a time, a thread 16 bytes of each line.
// A thread reads and writes the same words in all steps, so `out` may be `input`.
// Determinism: the order of the sum is that of the ranks, so bits depend on the elements alone, not on size or time.
// Blocks wait for peers only, never for each other, so all need not be resident at once.
#pragma once

#include "collectives/element.cuh"
#include "collectives/lines.cuh"

namespace te_graph::collectives {

// Ranks of a group where the compiler knows how many: loops over peers are then unrolled and ask for no end. 0: any
// number.
constexpr int kAnyWorld = 0;
template <int kWorld>
constexpr int kMostRanks = kWorld == kAnyWorld ? kMaxRanks : kWorld;

template <int kWorld>
__device__ __forceinline__ int world_of(const Peers& peers) {
    return kWorld == kAnyWorld ? peers.world : kWorld;
}
// Calls function(i) for i below the number of peers.
template <int kWorld, typename Function>
__device__ __forceinline__ void for_each_peer(const Peers& peers, const Function& function) {
#pragma unroll
    for (int i = 0; i < kMostRanks<kWorld> - 1; ++i) {
        if (kWorld != kAnyWorld || i < peers.world - 1) function(i);
    }
}

// Of the kernel for what each thread does a few lines of: wider blocks reach further.
template <int kWorld>
constexpr int kOnceThreads = kWorld == 2 ? 1024 : 512;

// Where a rank finds lines: each sender has a slot, in the order of the ranks. The slots' places do not depend on the
// operation, so ranks that are at different ones see each other's flags. Of the half that comes first.
template <typename Wire>
__device__ __forceinline__ char* slot_of(const Peers& peers, int from, int at) {
    return Wire::inbox(peers, at) + (from < at ? from : from - 1) * Wire::slot_bytes(peers);
}
__device__ __forceinline__ int peer_of_slot(int slot, int rank) { return slot < rank ? slot : slot + 1; }

// NaN in every float format.
__device__ inline Part poison() { return {~0ull, ~0ull}; }

// What a thread does with lines, by steps. `line`: of a piece, of job.count. Sums that are sent on lie behind what is
// summed.
template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kWorld>
class Line {
public:
    static constexpr bool kSendsSame = kSteps == Steps::kReduce || kSteps == Steps::kSend;
    static constexpr int kMostPeers = kMostRanks<kWorld> - 1;
    // Of the input, in the order in which they are sent.
    using Loaded = Part[kSendsSame ? 1 : kMostPeers];
    // What peers sent, in the order of their slots, which is that of their ranks.
    using Found = Part[kMostPeers];

    __device__ Line(const Peers& peers, const Job& job)
        : peers_(peers),
          job_(job),
          count_(static_cast<int>(job.count)),
          half_bytes_((world_of<kWorld>(peers) - 1) * Wire::slot_bytes(peers)),
          from_(part_of(Wire::inbox(peers, peers.rank))) {
        // Each rank sends to those behind it first, and each of its warps to another one: where all sent to one at a
        // time, its link would be all that is busy.
        const int world = world_of<kWorld>(peers), shift = (threadIdx.x / 32 + blockIdx.x) % (world - 1);
        for_each_peer<kWorld>(peers, [&](int i) {
            const int behind = i + shift < world - 1 ? i + shift + 1 : i + shift + 2 - world;
            const int p = peers.rank + behind < world ? peers.rank + behind : peers.rank + behind - world;
            to_[i] = part_of(slot_of<Wire>(peers, peers.rank, p));
            order_[i] = p;
        });
    }
    // For await_predecessor(): all addresses that it takes to load and send a line.
    __device__ uint64_t prepared(int line) const {
        uint64_t places = reinterpret_cast<uint64_t>(from_) | half_bytes_;
        for_each_peer<kWorld>(peers_, [&](int i) {
            places |= reinterpret_cast<uint64_t>(to_[i]);
            if (i == 0 || !kSendsSame)
                places |=
                    reinterpret_cast<uint64_t>(job_.input.begin(kSendsSame ? 0 : order_[i]) + Wire::offset_of(line));
        });
        return places;
    }
    // Behind what needs no turn.
    __device__ void enter(const Turn& turn) {
        const int64_t half = turn.is_odd() ? half_bytes_ : 0;
        for_each_peer<kWorld>(peers_, [&](int i) { to_[i] += half; });
        from_ += half;
        // The compiler would rather compute addresses anew for each line.
        keep(from_);
        for_each_peer<kWorld>(peers_, [&](int i) { keep(to_[i]); });
    }

    __device__ void load(int line, Loaded& parts) const {
        if (line >= count_) return;
        if constexpr (kSendsSame) {
            parts[0] = Wire::load(job_.input.begin(0), job_.input.size(0), line);
        } else {
            for_each_peer<kWorld>(peers_, [&](int i) {
                parts[i] = Wire::load(job_.input.begin(order_[i]), job_.input.size(order_[i]), line);
            });
        }
    }

    __device__ void send(const Turn& turn, int line, const Loaded& parts) const {
        if (line >= count_) return;
        if constexpr (kSteps == Steps::kSend) {
            const Part part = turn.failed() ? poison() : parts[0];
            Wire::store(job_.out.begin(peers_.rank), job_.out.size(peers_.rank), line, part);
        }
        if (turn.failed()) return;
        for_each_peer<kWorld>(peers_,
                              [&](int i) { Wire::send(place_at(i, line), parts[kSendsSame ? 0 : i], turn.flag()); });
    }

    // This rank's own part of what is summed here.
    __device__ Part own_part(int line) const {
        return line < count_ ? Wire::load(job_.input.begin(peers_.rank), job_.input.size(peers_.rank), line) : Part{};
    }

    __device__ void look(int line, Found& found) const { look_at(line, line < count_, found); }
    __device__ void look_at_sums(int line, Found& found) const { look_at(count_ + line, line < count_, found); }

    // Sends the sum on, where there is a second step. The peers' parts have been looked at once.
    __device__ void reduce(Turn& turn, int line, const Part& own, Found& found) const {
        const bool came = await(turn, line, line < count_, found);
        if (line >= count_) return;
        uint64_t first[kMostRanks<kWorld>], second[kMostRanks<kWorld>];
#pragma unroll
        for (int p = 0; p < kMostRanks<kWorld>; ++p) {
            // Indices that the compiler knows, so that parts stay in registers.
            const Part& below = found[p < kMostPeers ? p : kMostPeers - 1];
            const Part& above = found[p > 0 ? p - 1 : 0];
            first[p] = p == peers_.rank ? own.first : p < peers_.rank ? below.first : above.first;
            second[p] = p == peers_.rank ? own.second : p < peers_.rank ? below.second : above.second;
        }
        const int world = world_of<kWorld>(peers_);
        const Part sum =
            came ? Part{reduce_words<T, kReduction>(first, world), reduce_words<T, kReduction>(second, world)}
                 : poison();
        const int piece = kSteps == Steps::kReduceSend ? peers_.rank : 0;
        if (kSteps == Steps::kReduceSend && came) {
            for_each_peer<kWorld>(peers_, [&](int i) { Wire::send(place_at(i, count_ + line), sum, turn.flag()); });
        }
        Wire::store(job_.out.begin(piece), job_.out.size(piece), line, sum);
    }

    // Of an all-gather, or of sums.
    __device__ void gather(Turn& turn, int line, Found& found) const {
        const bool came = await(turn, kSteps == Steps::kReduceSend ? count_ + line : line, line < count_, found);
        if (line >= count_) return;
        for_each_peer<kWorld>(peers_, [&](int i) {
            const int p = peer_of_slot(i, peers_.rank);
            Wire::store(job_.out.begin(p), job_.out.size(p), line, came ? found[i] : poison());
        });
    }

private:
    static __device__ __forceinline__ void keep(char*& place) { asm volatile("" : "+l"(place)); }
    // Of a line of a slot: of this rank's, or of a peer's here.
    __device__ char* place_at(int i, int line) const { return to_[i] + line * int64_t{kLineBytes}; }
    __device__ char* place_of(int i, int line) const {
        return from_ + i * Wire::slot_bytes(peers_) + line * int64_t{kLineBytes};
    }

    __device__ void look_at(int line, bool is_there, Found& found) const {
        if (!is_there) return;
        for_each_peer<kWorld>(peers_, [&](int i) { found[i] = Wire::look(place_of(i, line)); });
    }

    // Looks again until all peers' parts of a line are there; whether they came.
    __device__ bool await(Turn& turn, int line, bool is_there, Found& found) const {
        if (turn.failed()) return false;
        while (true) {
            bool is_missing = false;
            int missing_slot = 0;
            uint64_t seen = 0;
            for_each_peer<kWorld>(peers_, [&](int i) {
                if (!is_there || !Wire::is_missing(found[i], turn.flag())) return;
                is_missing = true;
                missing_slot = i;
                seen = Wire::flag_of(found[i]);
            });
            if (!__any_sync(~0u, is_missing)) break;
            if (!turn.goes_on(is_missing, seen, peer_of_slot(missing_slot, peers_.rank))) return false;
            look_at(line, is_there, found);
        }
        turn.came();
        if (is_there) for_each_peer<kWorld>(peers_, [&](int i) { Wire::take(place_of(i, line)); });
        return true;
    }

    const Peers& peers_;
    const Job& job_;
    const int count_;
    int64_t half_bytes_;
    // What this lane has of the first line of slots: of the first peer's, which others follow; of this rank's, in the
    // order in which they are sent to.
    char* from_;
    char* to_[kMostPeers];
    int order_[kMostPeers];
};

template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kWorld>
__global__ void __launch_bounds__(Wire::threads(kWorld), 1)
    lines_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    using Work = Line<Wire, T, kReduction, kSteps, kWorld>;
    constexpr bool kReduces = kSteps != Steps::kSend, kGathers = kSteps == Steps::kReduceSend || !kReduces;
    // Turns from sending a line to the last that is done with it.
    constexpr int kDelay = kSteps == Steps::kReduceSend ? 2 * Wire::kAhead : Wire::kAhead;
    constexpr bool kKeepsOwn = Wire::kAhead == 1 && Work::kSendsSame;
    Work work(peers, job);
    Arrival arrival(peers, job.launch);
    const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int step = static_cast<int>(gridDim.x * blockDim.x) / 8;
    // The same for all threads of a warp: it votes on what has come.
    const int left = static_cast<int>(job.count) - (first - static_cast<int>(threadIdx.x) % 32 / 8);
    const int turns = left <= 0 ? 0 : (left + step - 1) / step;

    await_predecessor(arrival.prepared() | work.prepared(first));
    arrival.begin();
    typename Work::Loaded parts;
    Part own{};               // of what is summed next, where that is what was sent last
    work.load(first, parts);  // does not wait for the turn
    Turn turn(peers, job.signature, job.launch, arrival);
    work.enter(turn);
    Wire::begin(peers, turn);
    for (int i = 0; i < turns + kDelay; ++i) {
        const Part sent = parts[0];
        if (i < turns) {
            work.send(turn, first + i * step, parts);
            work.load(first + (i + 1) * step, parts);
        }
        if constexpr (kReduces) {
            const int summed = i - Wire::kAhead;
            if (0 <= summed && summed < turns) {
                const int line = first + summed * step;
                typename Work::Found found;
                const auto look_now = [&] { work.look(line, found); };
                if (summed == 0) {
                    Wire::look_first(peers, turn, look_now);
                } else {
                    look_now();
                }
                work.reduce(turn, line, kKeepsOwn ? own : work.own_part(line), found);
            }
        }
        own = sent;
        if constexpr (kGathers) {
            if (i >= kDelay) {
                const int line = first + (i - kDelay) * step;
                typename Work::Found found;
                if constexpr (kSteps == Steps::kReduceSend) {
                    work.look_at_sums(line, found);
                } else {
                    work.look(line, found);
                }
                work.gather(turn, line, found);
            }
        }
    }
    turn.end();
}

// The same for operations so small that each thread has kLines lines at most: no loop, since a microsecond is all
// there is.
template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kWorld, int kLines>
__global__ void __launch_bounds__(kOnceThreads<kWorld>, 1)
    lines_once_kernel(const __grid_constant__ Job job, const __grid_constant__ Peers peers) {
    using Work = Line<Wire, T, kReduction, kSteps, kWorld>;
    Work work(peers, job);
    Arrival arrival(peers, job.launch);
    const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int step = static_cast<int>(gridDim.x * blockDim.x) / 8;
    await_predecessor(arrival.prepared() | work.prepared(first));
    arrival.begin();
    typename Work::Loaded parts[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) work.load(first + i * step, parts[i]);
    Turn turn(peers, job.signature, job.launch, arrival);
    work.enter(turn);
    Wire::begin(peers, turn);
#pragma unroll
    for (int i = 0; i < kLines; ++i) work.send(turn, first + i * step, parts[i]);
    // A line is looked at while the one before is waited for.
    typename Work::Found found[2];
    Wire::look_first(peers, turn, [&] { work.look(first, found[0]); });
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        const int line = first + i * step;
        if (i + 1 < kLines) work.look(line + step, found[(i + 1) % 2]);
        if constexpr (kSteps == Steps::kSend) {
            work.gather(turn, line, found[i % 2]);
        } else {
            work.reduce(turn, line, Work::kSendsSame ? parts[i][0] : work.own_part(line), found[i % 2]);
        }
    }
    turn.end();
}

// Of a block, if all blocks together do all lines in so many turns: what a block has too many of warps another one
// lacks.
inline int threads_for(const Job& job, int64_t turns) {
    const int64_t lines = turns * job.blocks * kLinesPerWarp;
    return 32 * static_cast<int>((job.count + lines - 1) / lines);
}

template <typename Wire, typename T, Reduction kReduction, Steps kSteps, int kWorld>
cudaError_t launch_for(const Peers& peers, const Job& job, cudaStream_t stream) {
    if constexpr (kSteps != Steps::kReduceSend) {
        const auto launch_once = [&]<int kLines>() {
            return launch_early(lines_once_kernel<Wire, T, kReduction, kSteps, kWorld, kLines>,
                                threads_for(job, kLines), peers, job, stream);
        };
        const int64_t lines = static_cast<int64_t>(job.blocks) * kOnceThreads<kWorld> / 8;
        constexpr int kMostLines = kWorld == 2 && kSteps != Steps::kScatter ? Wire::kMostLines : 1;
        if (job.count <= lines) return launch_once.template operator()<1>();
        if constexpr (kMostLines >= 2) {
            if (job.count <= 2 * lines) return launch_once.template operator()<2>();
        }
        if constexpr (kMostLines >= 4) {
            if (job.count <= 4 * lines) return launch_once.template operator()<4>();
        }
    }
    const int64_t lines = static_cast<int64_t>(job.blocks) * Wire::threads(kWorld) / 8;
    return launch_early(lines_kernel<Wire, T, kReduction, kSteps, kWorld>,
                        threads_for(job, (job.count + lines - 1) / lines), peers, job, stream);
}

template <typename Wire, typename T, Reduction kReduction, Steps kSteps>
cudaError_t launch(const Peers& peers, const Job& job, cudaStream_t stream) {
    return peers.world == 2   ? launch_for<Wire, T, kReduction, kSteps, 2>(peers, job, stream)
           : peers.world == 4 ? launch_for<Wire, T, kReduction, kSteps, 4>(peers, job, stream)
           : peers.world == 8 ? launch_for<Wire, T, kReduction, kSteps, 8>(peers, job, stream)
                              : launch_for<Wire, T, kReduction, kSteps, kAnyWorld>(peers, job, stream);
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
