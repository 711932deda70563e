// Lamport as a protocol of the kernels in low_latency.cuh.
#pragma once

#include "collectives/low_latency.cuh"

namespace te_graph::collectives {

__device__ inline bool has_sentinel(uint64_t word) {
    return static_cast<uint32_t>(word) == kSentinelWord || static_cast<uint32_t>(word >> 32) == kSentinelWord;
}
// With sentinels replaced by another NaN.
__device__ inline uint64_t without_sentinel(uint64_t word) {
    const auto low = static_cast<uint32_t>(word), high = static_cast<uint32_t>(word >> 32);
    return static_cast<uint64_t>(min(high, kNanWord)) << 32 | min(low, kNanWord);
}

struct ProtoLamport {
    // Large blocks, so that one iteration keeps the links busy while the sums of the one before are computed.
    static constexpr int threads(int world) { return world == 2 ? 1024 : 512; }
    static constexpr int kDepth = 1;
    static constexpr int kMaxUnroll = 1;
    static constexpr bool kNarrows = false;

    __device__ static int64_t slot_bytes(const Peers& peers) { return peers.data_slot_bytes; }
    __device__ static char* receive_buffer(const Peers& peers, int rank) { return peers.data_slots(rank); }

    // A line with the flag to each peer, for this block and for blocks that peers have and this rank has not.
    template <int kWorld>
    __device__ static void send_handshakes(const Peers& peers, const LaunchState& state) {
        const int others = world_of<kWorld>(peers) - 1;
        const int lines = others * (kMaxBlocks / static_cast<int>(gridDim.x));
        if (state.failed() || threadIdx.x / 8 >= lines) return;
        const int64_t half = state.half(ProtoLL128::slot_bytes(peers));
#pragma unroll 1
        for (int i = threadIdx.x / 8; i < lines; i += blockDim.x / 8) {
            const int block = blockIdx.x + i / others * gridDim.x;
            char* const slot = slot_of<ProtoLL128>(peers, peers.rank, peer_of_slot(i % others, peers.rank)) + half;
            ProtoLL128::send(lane_address(slot) + block * kLineBytes, {}, state.flag());
        }
    }
    // Each warp receives the handshakes of all peers before it reads data, which could otherwise be that of another
    // operation. poll(): called before each poll of the handshakes.
    template <typename Poll>
    __device__ static void await_handshakes(const Peers& peers, LaunchState& state, const Poll& poll) {
        poll();
        if (state.failed()) return;
        const char* const handshakes = lane_address(ProtoLL128::receive_buffer(peers, peers.rank)) +
                                       state.half(ProtoLL128::slot_bytes(peers)) + blockIdx.x * kLineBytes;
        while (true) {
            bool is_missing = false;
            int missing_slot = 0;
            uint64_t seen = 0;
#pragma unroll 1
            for (int i = threadIdx.x % 32 / 8; i < peers.world - 1; i += kLinesPerWarp) {
                const Fragment fragment = receive_fragment(handshakes + i * peers.ll128_slot_bytes);
                if (!ProtoLL128::is_missing(fragment, state.flag())) continue;
                is_missing = true;
                missing_slot = i;
                seen = fragment.second;
            }
            if (!__any_sync(~0u, is_missing)) break;
            if (!state.keep_waiting(is_missing, seen, peer_of_slot(missing_slot, peers.rank))) return;
            poll();
        }
        state.restart_timeout();
    }

    // Offset of this lane's fragment of a line in the data.
    __device__ static int64_t lane_offset(int64_t line) { return line * kLineBytes + 16 * lane_in_line(); }
    __device__ static Fragment load(const char* begin, int64_t bytes, int64_t line) {
        const int64_t offset = lane_offset(line), left = bytes - offset;
        if (reinterpret_cast<uintptr_t>(begin) % 16 == 0 && left >= 16) {
            const Vector words = *reinterpret_cast<const Vector*>(begin + offset);
            return {without_sentinel(words.first), without_sentinel(words.second)};
        }
        return {without_sentinel(load_odd_word(begin + offset, left)),
                without_sentinel(load_odd_word(begin + offset + 8, left - 8))};
    }
    __device__ static void store(char* begin, int64_t bytes, int64_t line, const Fragment& fragment) {
        const int64_t offset = lane_offset(line), left = bytes - offset;
        if (reinterpret_cast<uintptr_t>(begin) % 16 == 0 && left >= 16) {
            *reinterpret_cast<Vector*>(begin + offset) = {fragment.first, fragment.second};
        } else {
            store_odd_word(begin + offset, left, fragment.first);
            store_odd_word(begin + offset + 8, left - 8, fragment.second);
        }
    }
    // Never a sentinel: sums that are NaN have other bits, and inputs were replaced when loaded.
    __device__ static void send(char* address, const Fragment& fragment, uint64_t) {
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(fragment.first),
                     "l"(fragment.second)
                     : "memory");
    }
    __device__ static Fragment poll(const char* address) {
        Fragment fragment;
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(fragment.first), "=l"(fragment.second)
                     : "l"(address)
                     : "memory");
        return fragment;
    }
    __device__ static bool is_missing(const Fragment& fragment, uint64_t) {
        return has_sentinel(fragment.first) || has_sentinel(fragment.second);
    }
    __device__ static uint64_t flag_of(const Fragment&) { return 0; }
    __device__ static void clear(char* address) {
        asm volatile("st.global.v2.u64 [%0], {%1, %1};" ::"l"(address), "l"(kSentinel) : "memory");
    }
};

}  // namespace te_graph::collectives
