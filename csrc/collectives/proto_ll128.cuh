// LL128 as a protocol of the kernels in low_latency.cuh.
#pragma once

#include "collectives/ll128.cuh"

namespace te_graph::collectives {

struct ProtoLL128 {
    // Largest block of the kernels with a loop, and iterations by which sending is ahead of receiving, so that the
    // links stay busy while sums are computed.
    static constexpr int threads(int) { return 512; }
    static constexpr int kDepth = 4;
    // Lines of a thread in kernels without a loop.
    static constexpr int kMaxUnroll = 4;

    __device__ static int64_t slot_bytes(const Peers& peers) { return peers.ll128_slot_bytes; }
    __device__ static char* receive_buffer(const Peers& peers, int rank) { return peers.ll128_slots(rank); }
    // Each line carries the flag of its operation.
    static constexpr bool kHasHandshake = false;
    template <int kWorld>
    __device__ static void send_handshakes(const Peers&, const LaunchState&) {}
    template <typename Poll>
    __device__ static void await_handshakes(const Peers&, LaunchState&, const Poll& poll) {
        poll();
    }
    __device__ static int64_t lane_offset(int64_t line) { return fragment_offset(line); }
    __device__ static Fragment load(const char* begin, int64_t bytes, int64_t line) {
        return load_fragment(begin, bytes, line);
    }
    __device__ static void store(char* begin, int64_t bytes, int64_t line, const Fragment& fragment) {
        store_fragment(begin, bytes, line, fragment);
    }
    __device__ static void send(char* address, const Fragment& fragment, uint64_t flag) {
        send_fragment(address, fragment, flag);
    }
    __device__ static Fragment poll(const char* address) { return receive_fragment(address); }
    __device__ static bool is_missing(const Fragment& fragment, uint64_t flag) {
        return lane_has_flag() && fragment.second != flag;
    }
    __device__ static uint64_t flag_of(const Fragment& fragment) { return fragment.second; }
    __device__ static void clear(char*) {}
};

}  // namespace te_graph::collectives
