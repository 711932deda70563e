// Tiles on the device: vectors of memory that begins anywhere, tiles that are sent and awaited.
#pragma once

#include "collectives/lines.cuh"
#include "collectives/tiles.h"

namespace te_graph::collectives {

// A block has two halves: one sends, one waits for peers and sums.
constexpr int kTileThreads = 256;                           // of a half
constexpr int kVectors = kTileBytes / (16 * kTileThreads);  // of a tile, that a thread has
enum class Half : int { kSender, kReceiver };
__device__ inline Half half_of_block() { return threadIdx.x < kTileThreads ? Half::kSender : Half::kReceiver; }
__device__ inline int thread_of_half() { return static_cast<int>(threadIdx.x) % kTileThreads; }

// All threads of a half meet; whether `value` is true for one of them. Barrier 0 is that of the whole block.
__device__ inline bool meet_in_half(bool value = false) {
    const auto barrier = 1 + static_cast<uint32_t>(half_of_block());
    uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 q, %1, 0;\n"
        "barrier.cta.red.or.pred p, %2, %3, q;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(any)
        : "r"(static_cast<uint32_t>(value)), "r"(barrier), "n"(kTileThreads)
        : "memory");
    return any != 0;
}

// 16 bytes.
struct alignas(16) Vector {
    uint64_t first, second;
};
using Vectors = Vector[kVectors];

__device__ inline int64_t vector_offset(int64_t tile, int i) {
    return tile * kTileBytes + (i * kTileThreads + thread_of_half()) * int64_t{16};
}

// Not inlined: rare, and registers are scarce.
__device__ inline __noinline__ Vector load_odd_vector(const char* place, int64_t left) {
    return {load_some(place, left), load_some(place + 8, left - 8)};
}
__device__ inline __noinline__ void store_odd_vector(char* place, int64_t left, uint64_t first, uint64_t second) {
    store_some(place, left, first);
    store_some(place + 8, left - 8, second);
}

// A tile of `bytes` bytes that begin anywhere; what lies behind them is 0.
__device__ inline void load_tile(const char* begin, int64_t bytes, int64_t tile, Vectors& vectors) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t offset = vector_offset(tile, i);
        vectors[i] = is_aligned && offset + 16 <= bytes ? *reinterpret_cast<const Vector*>(begin + offset)
                                                        : load_odd_vector(begin + offset, bytes - offset);
    }
}
__device__ inline void store_tile(char* begin, int64_t bytes, int64_t tile, const Vectors& vectors) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int64_t offset = vector_offset(tile, i);
        if (is_aligned && offset + 16 <= bytes) {
            *reinterpret_cast<Vector*>(begin + offset) = vectors[i];
        } else {
            store_odd_vector(begin + offset, bytes - offset, vectors[i].first, vectors[i].second);
        }
    }
}
// What a peer has written: not from the first cache, which does not see that.
__device__ inline Vector load_received(const char* tiles, int64_t tile, int i) {
    const longlong2 raw = __ldcg(reinterpret_cast<const longlong2*>(tiles + vector_offset(tile, i)));
    return {static_cast<uint64_t>(raw.x), static_cast<uint64_t>(raw.y)};
}

__device__ inline uint64_t load_acquire(const uint64_t* place) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
    return value;
}

// The slots of a sender in a receiver's inboxes.
class TileSlot {
public:
    __device__ TileSlot(const Peers& peers, const Turn& turn, int from, int at) {
        const int slot = from < at ? from : from - 1;
        hello_ = peers.lines(at) + turn.half(peers.line_slot_bytes) + slot * peers.line_slot_bytes;
        flags_ = peers.flags(at) + turn.half(peers.flag_slot_bytes) + slot * peers.flag_slot_bytes;
        tiles_ = peers.data(at) + turn.half(peers.data_slot_bytes) + slot * peers.data_slot_bytes;
    }

    __device__ char* hello() const { return hello_; }
    __device__ uint64_t hello_flag() const {
        return load_relaxed(reinterpret_cast<const uint64_t*>(hello_ + kLineData));
    }
    __device__ uint64_t* flag(int64_t tile) const { return reinterpret_cast<uint64_t*>(flags_) + tile; }
    __device__ char* tiles() const { return tiles_; }

private:
    char *hello_, *flags_, *tiles_;
};

}  // namespace te_graph::collectives
