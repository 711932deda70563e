// Transfer of 128-byte lines, for the low-latency protocols: load, send, poll, reduce, gather.
//
// `Proto` is the protocol (ProtoLL128, ProtoLamport): it defines which fragment of a line a thread holds and how a
// fragment is loaded, sent, polled and stored.
#pragma once

#include "collectives/ll128.cuh"
#include "collectives/reduce.cuh"

namespace te_graph::collectives {

// Number of ranks where it is known at compile time, so that loops over peers are unrolled without bounds checks.
// 0: any number.
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

// The slot of sender `from` in the receive buffer of rank `at`, in the first half: slots are in rank order. Their
// addresses do not depend on the operation, so ranks that run different operations see each other's flags.
template <typename Proto>
__device__ __forceinline__ char* slot_of(const Peers& peers, int from, int at) {
    return Proto::receive_buffer(peers, at) + (from < at ? from : from - 1) * Proto::slot_bytes(peers);
}
__device__ __forceinline__ int peer_of_slot(int slot, int rank) { return slot < rank ? slot : slot + 1; }

// NaN in every float format.
__device__ inline Fragment nan_fragment() { return {~0ull, ~0ull}; }

// The lines of a thread. `line`: index within a piece, below args.count. In a slot, the sums of the second phase of a
// two-shot all-reduce follow the operands of the first.
template <typename Proto, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld>
class LineTransfer {
public:
    static constexpr bool kSendsSame = kAlgorithm == Algorithm::kOneShot || kAlgorithm == Algorithm::kAllGather;
    static constexpr int kMostPeers = kMostRanks<kWorld> - 1;
    // Fragments of the input, in the order in which they are sent.
    using Outgoing = Fragment[kSendsSame ? 1 : kMostPeers];
    // Fragments sent by the peers, in the order of their slots, which is that of their ranks.
    using Received = Fragment[kMostPeers];

    __device__ LineTransfer(const Peers& peers, const LaunchArgs& args)
        : peers_(peers),
          args_(args),
          count_(static_cast<int>(args.count)),
          half_bytes_((world_of<kWorld>(peers) - 1) * Proto::slot_bytes(peers)),
          from_(lane_address(Proto::receive_buffer(peers, peers.rank))) {
        // Each rank starts with its successor and each of its warps with another peer: if all sent to one rank at a
        // time, only that rank's link would be busy.
        const int world = world_of<kWorld>(peers), shift = (threadIdx.x / 32 + blockIdx.x) % (world - 1);
        for_each_peer<kWorld>(peers, [&](int i) {
            const int behind = i + shift < world - 1 ? i + shift + 1 : i + shift + 2 - world;
            const int p = peers.rank + behind < world ? peers.rank + behind : peers.rank + behind - world;
            to_[i] = lane_address(slot_of<Proto>(peers, peers.rank, p));
            order_[i] = p;
        });
    }
    // Operands for await_predecessor(): all addresses needed to load and send a line.
    __device__ uint64_t prepared(int line) const {
        uint64_t addresses = reinterpret_cast<uint64_t>(from_) | half_bytes_;
        for_each_peer<kWorld>(peers_, [&](int i) {
            addresses |= reinterpret_cast<uint64_t>(to_[i]);
            if (i == 0 || !kSendsSame)
                addresses |= reinterpret_cast<uint64_t>(args_.input.begin(kSendsSame ? 0 : order_[i]) +
                                                        Proto::lane_offset(line));
        });
        return addresses;
    }
    // To be called once the sequence number is known, after all that does not depend on it.
    __device__ void select_half(const LaunchState& state) {
        const int64_t half = state.is_odd() ? half_bytes_ : 0;
        for_each_peer<kWorld>(peers_, [&](int i) { to_[i] += half; });
        from_ += half;
        // Keeps the addresses in registers: the compiler would recompute them for each line.
        keep(from_);
        for_each_peer<kWorld>(peers_, [&](int i) { keep(to_[i]); });
    }

    __device__ void load(int line, Outgoing& fragments) const {
        if (line >= count_) return;
        if constexpr (kSendsSame) {
            fragments[0] = Proto::load(args_.input.begin(0), args_.input.size(0), line);
        } else {
            for_each_peer<kWorld>(peers_, [&](int i) {
                fragments[i] = Proto::load(args_.input.begin(order_[i]), args_.input.size(order_[i]), line);
            });
        }
    }

    __device__ void send(const LaunchState& state, int line, const Outgoing& fragments) const {
        if (line >= count_) return;
        if constexpr (kAlgorithm == Algorithm::kAllGather) {
            const Fragment fragment = state.failed() ? nan_fragment() : fragments[0];
            Proto::store(args_.out.begin(peers_.rank), args_.out.size(peers_.rank), line, fragment);
        }
        if (state.failed()) return;
        for_each_peer<kWorld>(
            peers_, [&](int i) { Proto::send(peer_address(i, line), fragments[kSendsSame ? 0 : i], state.flag()); });
    }

    // This rank's own operand of the sum it computes.
    __device__ Fragment load_own(int line) const {
        return line < count_ ? Proto::load(args_.input.begin(peers_.rank), args_.input.size(peers_.rank), line)
                             : Fragment{};
    }

    __device__ void poll(int line, Received& received) const { poll_line(line, line < count_, received); }
    __device__ void poll_sums(int line, Received& received) const { poll_line(count_ + line, line < count_, received); }

    // Reduces a line, and sends the sum to all peers in a two-shot all-reduce. `received` has been polled once.
    __device__ void reduce(LaunchState& state, int line, const Fragment& own, Received& received) const {
        const bool is_received = await(state, line, line < count_, received);
        if (line >= count_) return;
        uint64_t first[kMostRanks<kWorld>], second[kMostRanks<kWorld>];
#pragma unroll
        for (int p = 0; p < kMostRanks<kWorld>; ++p) {
            // Indices known at compile time, so that fragments stay in registers.
            const Fragment& below = received[p < kMostPeers ? p : kMostPeers - 1];
            const Fragment& above = received[p > 0 ? p - 1 : 0];
            first[p] = p == peers_.rank ? own.first : p < peers_.rank ? below.first : above.first;
            second[p] = p == peers_.rank ? own.second : p < peers_.rank ? below.second : above.second;
        }
        const int world = world_of<kWorld>(peers_);
        const Fragment sum = is_received ? Fragment{reduce_words<T, kReduction>(first, world),
                                                    reduce_words<T, kReduction>(second, world)}
                                         : nan_fragment();
        const int piece = kAlgorithm == Algorithm::kTwoShot ? peers_.rank : 0;
        if (kAlgorithm == Algorithm::kTwoShot && is_received) {
            for_each_peer<kWorld>(peers_,
                                  [&](int i) { Proto::send(peer_address(i, count_ + line), sum, state.flag()); });
        }
        Proto::store(args_.out.begin(piece), args_.out.size(piece), line, sum);
    }

    // Stores a line of each peer: of an all-gather, or of the second phase of a two-shot all-reduce.
    __device__ void gather(LaunchState& state, int line, Received& received) const {
        const bool is_received =
            await(state, kAlgorithm == Algorithm::kTwoShot ? count_ + line : line, line < count_, received);
        if (line >= count_) return;
        for_each_peer<kWorld>(peers_, [&](int i) {
            const int p = peer_of_slot(i, peers_.rank);
            Proto::store(args_.out.begin(p), args_.out.size(p), line, is_received ? received[i] : nan_fragment());
        });
    }

private:
    static __device__ __forceinline__ void keep(char*& address) { asm volatile("" : "+l"(address)); }
    // Address of a line: in this rank's slot at a peer, or in a peer's slot at this rank.
    __device__ char* peer_address(int i, int line) const { return to_[i] + line * int64_t{kLineBytes}; }
    __device__ char* own_address(int i, int line) const {
        return from_ + i * Proto::slot_bytes(peers_) + line * int64_t{kLineBytes};
    }

    __device__ void poll_line(int line, bool is_there, Received& received) const {
        if (!is_there) return;
        for_each_peer<kWorld>(peers_, [&](int i) { received[i] = Proto::poll(own_address(i, line)); });
    }

    // Polls until a line of all peers has arrived; false if the operation failed.
    __device__ bool await(LaunchState& state, int line, bool is_there, Received& received) const {
        if (state.failed()) return false;
        while (true) {
            bool is_missing = false;
            int missing_slot = 0;
            uint64_t seen = 0;
            for_each_peer<kWorld>(peers_, [&](int i) {
                if (!is_there || !Proto::is_missing(received[i], state.flag())) return;
                is_missing = true;
                missing_slot = i;
                seen = Proto::flag_of(received[i]);
            });
            if (!__any_sync(~0u, is_missing)) break;
            if (!state.keep_waiting(is_missing, seen, peer_of_slot(missing_slot, peers_.rank))) return false;
            poll_line(line, is_there, received);
        }
        state.restart_timeout();
        if (is_there) for_each_peer<kWorld>(peers_, [&](int i) { Proto::clear(own_address(i, line)); });
        return true;
    }

    const Peers& peers_;
    const LaunchArgs& args_;
    const int count_;
    int64_t half_bytes_;
    // This lane's address in the first line of slots: of the first peer's slot here (the others follow), and of this
    // rank's slots at the peers, in sending order.
    char* from_;
    char* to_[kMostPeers];
    int order_[kMostPeers];
};

}  // namespace te_graph::collectives
