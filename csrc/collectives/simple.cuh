// The simple protocol on the device: loads and stores of chunks of any alignment, and the slots of a sender.
#pragma once

#include "collectives/ll128.cuh"
#include "collectives/simple.h"

namespace te_graph::collectives {

// Half of the threads of a block send, the other half receive.
constexpr int kRoleThreads = 256;                            // of a role
constexpr int kVectors = kChunkBytes / (16 * kRoleThreads);  // of a chunk, per thread
enum class Role : int { kSender, kReceiver };
__device__ inline Role role_of_block() { return threadIdx.x < kRoleThreads ? Role::kSender : Role::kReceiver; }
__device__ inline int thread_in_role() { return static_cast<int>(threadIdx.x) % kRoleThreads; }

// Barrier of the threads of a role; whether `value` is true for any of them. Barrier 0 is that of the whole block.
__device__ inline bool sync_role(bool value = false) {
    const auto barrier = 1 + static_cast<uint32_t>(role_of_block());
    uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 q, %1, 0;\n"
        "barrier.cta.red.or.pred p, %2, %3, q;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(any)
        : "r"(static_cast<uint32_t>(value)), "r"(barrier), "n"(kRoleThreads)
        : "memory");
    return any != 0;
}

// 16 bytes.
struct alignas(16) Vector {
    uint64_t first, second;
};
using Vectors = Vector[kVectors];

__device__ inline int64_t vector_offset(int64_t chunk, int i) {
    return chunk * kChunkBytes + (i * kRoleThreads + thread_in_role()) * int64_t{16};
}

// Not inlined: rare, and would cost registers.
__device__ inline __noinline__ Vector load_odd_vector(const char* address, int64_t left) {
    return {load_some(address, left), load_some(address + 8, left - 8)};
}
__device__ inline __noinline__ void store_odd_vector(char* address, int64_t left, uint64_t first, uint64_t second) {
    store_some(address, left, first);
    store_some(address + 8, left - 8, second);
}

// A chunk of the `bytes` bytes at `begin`, of any alignment; zero-padded.
__device__ inline void load_chunk(const char* begin, int64_t bytes, int64_t chunk, Vectors& vectors) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t offset = vector_offset(chunk, i);
        vectors[i] = is_aligned && offset + 16 <= bytes ? *reinterpret_cast<const Vector*>(begin + offset)
                                                        : load_odd_vector(begin + offset, bytes - offset);
    }
}
__device__ inline void store_chunk(char* begin, int64_t bytes, int64_t chunk, const Vectors& vectors) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t offset = vector_offset(chunk, i);
        if (is_aligned && offset + 16 <= bytes) {
            *reinterpret_cast<Vector*>(begin + offset) = vectors[i];
        } else {
            store_odd_vector(begin + offset, bytes - offset, vectors[i].first, vectors[i].second);
        }
    }
}
// Data written by a peer: bypasses L1, which is not coherent with it.
__device__ inline Vector load_received(const char* chunks, int64_t chunk, int i) {
    const longlong2 raw = __ldcg(reinterpret_cast<const longlong2*>(chunks + vector_offset(chunk, i)));
    return {static_cast<uint64_t>(raw.x), static_cast<uint64_t>(raw.y)};
}

__device__ inline uint64_t load_acquire(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// The slots of a sender in the receive buffer of a rank.
class ChunkSlot {
public:
    __device__ ChunkSlot(const Peers& peers, const LaunchState& state, int from, int at) {
        const int slot = from < at ? from : from - 1;
        handshake_ = peers.ll128_slots(at) + state.half(peers.ll128_slot_bytes) + slot * peers.ll128_slot_bytes;
        flags_ = peers.flag_slots(at) + state.half(peers.flag_slot_bytes) + slot * peers.flag_slot_bytes;
        chunks_ = peers.data_slots(at) + state.half(peers.data_slot_bytes) + slot * peers.data_slot_bytes;
    }

    __device__ char* handshake() const { return handshake_; }
    __device__ uint64_t handshake_flag() const {
        return load_relaxed(reinterpret_cast<const uint64_t*>(handshake_ + kLineData));
    }
    __device__ uint64_t* flag(int64_t chunk) const { return reinterpret_cast<uint64_t*>(flags_) + chunk; }
    __device__ char* chunks() const { return chunks_; }

private:
    char *handshake_, *flags_, *chunks_;
};

}  // namespace te_graph::collectives
