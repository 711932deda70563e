// LL128 on the device: loads and stores of unaligned memory, and lines that are sent and polled.
#pragma once

#include "collectives/launch_state.cuh"
#include "collectives/protocols.h"

namespace te_graph::collectives {

template <typename Unit>
__device__ uint64_t load_units(const char* address, int bytes) {
    uint64_t word = 0;
    for (int i = 0; i < bytes; i += sizeof(Unit)) {
        word |= static_cast<uint64_t>(*reinterpret_cast<const Unit*>(address + i)) << (8 * i);
    }
    return word;
}
template <typename Unit>
__device__ void store_units(char* address, int bytes, uint64_t word) {
    for (int i = 0; i < bytes; i += sizeof(Unit))
        *reinterpret_cast<Unit*>(address + i) = static_cast<Unit>(word >> (8 * i));
}

// Calls function.operator()<Unit>() with the largest type of up to 4 bytes that address and length are multiples of.
template <typename Function>
__device__ auto with_unit(const char* address, int bytes, const Function& function) {
    const auto odd = reinterpret_cast<uintptr_t>(address) | static_cast<uintptr_t>(bytes);
    if (odd % 4 == 0) return function.template operator()<uint32_t>();
    if (odd % 2 == 0) return function.template operator()<uint16_t>();
    return function.template operator()<uint8_t>();
}

// Up to 8 of the `left` bytes at `address`, of any alignment; zero-padded.
__device__ inline uint64_t load_some(const char* address, int64_t left) {
    if (left <= 0) return 0;
    const int count = left < 8 ? static_cast<int>(left) : 8;
    return with_unit(address, count, [&]<typename Unit>() { return load_units<Unit>(address, count); });
}
__device__ inline void store_some(char* address, int64_t left, uint64_t word) {
    if (left <= 0) return;
    const int count = left < 8 ? static_cast<int>(left) : 8;
    with_unit(address, count, [&]<typename Unit>() { store_units<Unit>(address, count, word); });
}

// Accesses of 16 aligned bytes.
struct alignas(16) Vector {
    uint64_t first, second;
};

// A lane's 16 bytes of a line: two words, or in every eighth lane one word and the flag.
struct Fragment {
    uint64_t first, second;
};
__device__ inline int lane_in_line() { return threadIdx.x % 8; }
__device__ inline bool lane_has_flag() { return lane_in_line() == 7; }

// Words at the end of a tensor, or unaligned ones. Not inlined: rare, and the callers are to stay small.
__device__ inline __noinline__ uint64_t load_odd_word(const char* address, int64_t left) {
    return load_some(address, left);
}
__device__ inline __noinline__ void store_odd_word(char* address, int64_t left, uint64_t word) {
    store_some(address, left, word);
}
// Eight of the `left` bytes at `address`.
__device__ inline uint64_t load_word(const char* address, int64_t left, bool is_aligned) {
    if (left <= 0) return 0;
    return is_aligned && left >= 8 ? *reinterpret_cast<const uint64_t*>(address) : load_odd_word(address, left);
}
__device__ inline void store_word(char* address, int64_t left, bool is_aligned, uint64_t word) {
    if (left <= 0) return;
    if (is_aligned && left >= 8) {
        *reinterpret_cast<uint64_t*>(address) = word;
    } else {
        store_odd_word(address, left, word);
    }
}

// Offset of this lane's fragment of a line in the data.
__device__ inline int64_t fragment_offset(int64_t line) { return line * kLineData + 16 * lane_in_line(); }
// This lane's fragment of a line of the `bytes` bytes at `begin`, of any alignment.
__device__ inline Fragment load_fragment(const char* begin, int64_t bytes, int64_t line) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 8 == 0;
    const int64_t offset = fragment_offset(line), left = bytes - offset;
    return {load_word(begin + offset, left, is_aligned),
            lane_has_flag() ? 0 : load_word(begin + offset + 8, left - 8, is_aligned)};
}
__device__ inline void store_fragment(char* begin, int64_t bytes, int64_t line, const Fragment& fragment) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 8 == 0;
    const int64_t offset = fragment_offset(line), left = bytes - offset;
    store_word(begin + offset, left, is_aligned, fragment.first);
    if (!lane_has_flag()) store_word(begin + offset + 8, left - 8, is_aligned, fragment.second);
}

// Address of this lane's fragment of the first line of a slot; other lines follow every kLineBytes.
template <typename Byte>
__device__ __forceinline__ Byte* lane_address(Byte* slot) {
    return slot + 16 * lane_in_line();
}

// Converges the eight lanes of a line, so that one instruction transfers all of it. NVLink and L2 keep its 128 bytes
// together.
__device__ inline void sync_line() { __syncwarp(0xFFu << (threadIdx.x & 24)); }
__device__ inline void send_fragment(char* address, const Fragment& fragment, uint64_t flag) {
    const uint64_t second = lane_has_flag() ? flag : fragment.second;
    sync_line();
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(fragment.first), "l"(second)
                 : "memory");
}
__device__ inline Fragment receive_fragment(const char* address) {
    Fragment fragment;
    sync_line();
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(fragment.first), "=l"(fragment.second)
                 : "l"(address)
                 : "memory");
    return fragment;
}

// LL128 as a protocol of the kernels in low_latency.cuh.
struct ProtoLL128 {
    // Largest block of the kernels with a loop, and iterations by which sending is ahead of receiving, so that the
    // links stay busy while sums are computed.
    static constexpr int threads(int) { return 512; }
    static constexpr int kDepth = 4;
    // Lines of a thread in kernels without a loop.
    static constexpr int kMaxUnroll = 4;
    // Whether lines have elements of lower precision than the tensors; then the protocol also has store_sums().
    static constexpr bool kNarrows = false;

    __device__ static int64_t slot_bytes(const Peers& peers) { return peers.ll128_slot_bytes; }
    __device__ static char* receive_buffer(const Peers& peers, int rank) { return peers.ll128_slots(rank); }
    // No handshake: each line carries the flag of its operation.
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
