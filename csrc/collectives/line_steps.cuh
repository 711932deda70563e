// What a thread does with lines of its own, step by step: load, send, look, sum, gather.
//
// A Wire is how: by lines that bear flags, or by words. It says what a thread has of a line, and how that is loaded,
// sent, looked at and stored.
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

}  // namespace te_graph::collectives
