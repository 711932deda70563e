// Kernels of the low-latency protocols, LL128 and Lamport, where data shows by itself that it has arrived.
//
// Formula: out = (x_0 + x_1 + ...) * scale in rank order, in fp32, rounded once (or the maximum, or the concatenation
// of all x), for words of 8 bytes.
// Grid: blocks of up to 1024 threads; each warp transfers every n-th group of four lines of each piece, a thread 16
// bytes of each line.
// A thread reads and writes the same words in all phases, so `out` may be `input`. Of a reduce-scatter it may be this
// rank's own part of the input: that is sent to nobody, and a word of it is read by the thread that then writes it.
// Determinism: sums are taken in rank order, so the bits depend on the elements alone, not on size or timing.
// Blocks wait for peers only, never for each other, so they need not all be resident at once.
#pragma once

#include "collectives/ll128.cuh"
#include "collectives/reduce.cuh"

namespace te_graph::collectives {

// Number of ranks where it is known at compile time, so that loops over peers are unrolled without bounds checks.
// 0: any number.
constexpr int kAnyWorld = 0;
template <int kWorld>
constexpr int kMaxWorld = kWorld == kAnyWorld ? kMaxRanks : kWorld;

template <int kWorld>
__device__ __forceinline__ int world_of(const Peers& peers) {
    return kWorld == kAnyWorld ? peers.world : kWorld;
}
// Calls function(i) for i below the number of peers.
template <int kWorld, typename Function>
__device__ __forceinline__ void for_each_peer(const Peers& peers, const Function& function) {
#pragma unroll
    for (int i = 0; i < kMaxWorld<kWorld> - 1; ++i) {
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

// Transfer of the lines of a thread: load, send, poll, reduce, gather. `Proto` is the protocol (ProtoLL128,
// ProtoLamport, ProtoLamportBf16): it defines which fragment of a line a thread holds and how a fragment is loaded,
// sent, polled and stored. `T`: elements of a line. `line`: index within a piece, below args.count. In a slot, the sums
// of the second phase of a two-shot all-reduce follow the operands of the first.
template <typename Proto, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld>
class LineTransfer {
public:
    static constexpr bool kSendsSame = kAlgorithm == Algorithm::kOneShot || kAlgorithm == Algorithm::kAllGather;
    static constexpr int kMaxPeers = kMaxWorld<kWorld> - 1;
    // Fragments of the input, in the order in which they are sent.
    using Outgoing = Fragment[kSendsSame ? 1 : kMaxPeers];
    // Fragments sent by the peers, in the order of their slots, which is that of their ranks.
    using Received = Fragment[kMaxPeers];

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

    // The factor of the sums. Memory: the predecessor has to have ended.
    __device__ float scale() const {
        return kReduction == Reduction::kSum && args_.scale_tensor != nullptr ? args_.scale * *args_.scale_tensor
                                                                              : args_.scale;
    }

    // Reduces a line, and sends the sum to all peers in a two-shot all-reduce. `received` has been polled once.
    // scale(): the factor, asked for when all has arrived.
    template <typename Scale>
    __device__ void reduce(LaunchState& state, int line, const Fragment& own, const Scale& scale,
                           Received& received) const {
        const bool is_received = await(state, line, line < count_, received);
        if (line >= count_) return;
        uint64_t first[kMaxWorld<kWorld>], second[kMaxWorld<kWorld>];
#pragma unroll
        for (int p = 0; p < kMaxWorld<kWorld>; ++p) {
            // Indices known at compile time, so that fragments stay in registers.
            const Fragment& below = received[p < kMaxPeers ? p : kMaxPeers - 1];
            const Fragment& above = received[p > 0 ? p - 1 : 0];
            first[p] = p == peers_.rank ? own.first : p < peers_.rank ? below.first : above.first;
            second[p] = p == peers_.rank ? own.second : p < peers_.rank ? below.second : above.second;
        }
        const int world = world_of<kWorld>(peers_);
        const float factor = scale();
        if constexpr (Proto::kNarrows && kAlgorithm == Algorithm::kReduceScatter) {
            // These sums are not sent, so they are not rounded.
            if (is_received) {
                return Proto::store_sums(args_.out.begin(0), args_.out.size(0), line,
                                         {reduce_words<float, T, kReduction>(first, world, factor),
                                          reduce_words<float, T, kReduction>(second, world, factor)});
            }
        }
        const auto sum_of = [&](const auto& words) {
            return __builtin_bit_cast(uint64_t, reduce_words<T, T, kReduction>(words, world, factor));
        };
        const Fragment sum = is_received ? Fragment{sum_of(first), sum_of(second)} : nan_fragment();
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
    char* to_[kMaxPeers];
    int order_[kMaxPeers];
};

// Largest block of the kernels without a loop: larger blocks cover more sizes.
template <int kWorld>
constexpr int kUnrolledThreads = kWorld == 2 ? 1024 : 512;
// kUnrolled: lines of a thread; 0: any number, in a loop.
template <typename Proto, int kWorld, int kUnrolled>
constexpr int kMaxThreads = kUnrolled == 0 ? Proto::threads(kWorld) : kUnrolledThreads<kWorld>;

template <typename Proto, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld>
__device__ __forceinline__ void run_loop(const LaunchArgs& args, const Peers& peers) {
    using Transfer = LineTransfer<Proto, T, kReduction, kAlgorithm, kWorld>;
    constexpr bool kReduces = kAlgorithm != Algorithm::kAllGather,
                   kGathers = kAlgorithm == Algorithm::kTwoShot || !kReduces;
    // Iterations from sending a line to the last that uses it.
    constexpr int kDelay = kAlgorithm == Algorithm::kTwoShot ? 2 * Proto::kDepth : Proto::kDepth;
    constexpr bool kKeepsOwn = Proto::kDepth == 1 && Transfer::kSendsSame;
    Transfer transfer(peers, args);
    Arrival arrival(peers, args.launch);
    const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 8;
    const int step = static_cast<int>(gridDim.x * blockDim.x) / 8;
    // The same for all threads of a warp, which votes on what has arrived.
    const int left = static_cast<int>(args.count) - (first - static_cast<int>(threadIdx.x) % 32 / 8);
    const int iterations = left <= 0 ? 0 : (left + step - 1) / step;

    await_predecessor(arrival.prepared() | transfer.prepared(first));
    arrival.begin();
    typename Transfer::Outgoing fragments;
    transfer.load(first, fragments);  // needs no sequence number
    const float scale = transfer.scale();
    LaunchState state(peers, args.fingerprint, args.launch, arrival);
    transfer.select_half(state);
    transfer.send(state, first, fragments);
    // After the first data, so that the links are not idle meanwhile.
    Proto::template send_handshakes<kWorld>(peers, state);
    Fragment own = fragments[0];  // operand of the next sum, where that is what was sent last
    transfer.load(first + step, fragments);
    Proto::await_handshakes(peers, state, [] {});
    for (int i = 1; i < iterations + kDelay; ++i) {
        const Fragment sent = fragments[0];
        if (i < iterations) {
            transfer.send(state, first + i * step, fragments);
            transfer.load(first + (i + 1) * step, fragments);
        }
        if constexpr (kReduces) {
            const int reduced = i - Proto::kDepth;
            if (0 <= reduced && reduced < iterations) {
                const int line = first + reduced * step;
                typename Transfer::Received received;
                transfer.poll(line, received);
                transfer.reduce(
                    state, line, kKeepsOwn ? own : transfer.load_own(line), [&] { return scale; }, received);
            }
        }
        own = sent;
        if constexpr (kGathers) {
            if (i >= kDelay) {
                const int line = first + (i - kDelay) * step;
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
    LaunchState state(peers, args.fingerprint, args.launch, arrival);
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
            // The factor is read for each line: these kernels have no register left to keep it.
            transfer.reduce(
                state, line, Transfer::kSendsSame ? fragments[i][0] : transfer.load_own(line),
                [&] { return transfer.scale(); }, received[i % 2]);
        }
    }
    state.end();
}

// The body of all kernels.
template <typename Proto, typename T, Reduction kReduction, Algorithm kAlgorithm, int kWorld, int kUnrolled>
__device__ __forceinline__ void run(const LaunchArgs& args, const Peers& peers) {
    if constexpr (kUnrolled == 0) {
        run_loop<Proto, T, kReduction, kAlgorithm, kWorld>(args, peers);
    } else {
        run_unrolled<Proto, T, kReduction, kAlgorithm, kWorld, kUnrolled>(args, peers);
    }
}

// A kernel, and the threads of each of its blocks.
struct SizedKernel {
    void (*function)(LaunchArgs, Peers);
    int threads;
};

// Kernels: of a protocol; Kernels::get<kAlgorithm, T, kReduction, kWorld, kUnrolled>() is a __global__ function.
template <typename Kernels, typename T, Reduction kReduction, Algorithm kAlgorithm>
SizedKernel kernel_of(const LaunchArgs& args, int world) {
    using Proto = typename Kernels::Proto;
    const auto for_world = [&]<int kWorld>() {
        const auto sized = [&]<int kUnrolled>(int64_t iterations) {
            return SizedKernel{Kernels::template get<kAlgorithm, T, kReduction, kWorld, kUnrolled>(),
                               threads_for(args.count, args.blocks, iterations)};
        };
        if constexpr (kAlgorithm != Algorithm::kTwoShot) {
            constexpr int kMaxUnroll = kWorld == 2 && kAlgorithm != Algorithm::kReduceScatter ? Proto::kMaxUnroll : 1;
            const int64_t lines = static_cast<int64_t>(args.blocks) * kUnrolledThreads<kWorld> / 8;
            if (args.count <= lines) return sized.template operator()<1>(1);
            if constexpr (kMaxUnroll >= 2) {
                if (args.count <= 2 * lines) return sized.template operator()<2>(2);
            }
            if constexpr (kMaxUnroll >= 4) {
                if (args.count <= 4 * lines) return sized.template operator()<4>(4);
            }
        }
        const int64_t lines = static_cast<int64_t>(args.blocks) * Proto::threads(kWorld) / 8;
        return sized.template operator()<0>((args.count + lines - 1) / lines);
    };
    switch (world) {
        case 2:
            return for_world.template operator()<2>();
        case 4:
            return for_world.template operator()<4>();
        case 8:
            return for_world.template operator()<8>();
        default:
            return for_world.template operator()<kAnyWorld>();
    }
}

// All algorithms but kAllGather.
template <typename Kernels>
SizedKernel reduction_kernel_of(const LaunchArgs& args, int world) {
    return with_reduction(args.element, args.reduction, [&]<typename T, Reduction kReduction>() {
        switch (args.algorithm) {
            case Algorithm::kOneShot:
                return kernel_of<Kernels, T, kReduction, Algorithm::kOneShot>(args, world);
            case Algorithm::kTwoShot:
                return kernel_of<Kernels, T, kReduction, Algorithm::kTwoShot>(args, world);
            default:
                return kernel_of<Kernels, T, kReduction, Algorithm::kReduceScatter>(args, world);
        }
    });
}

}  // namespace te_graph::collectives
