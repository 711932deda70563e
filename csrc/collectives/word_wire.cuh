// Words as the kernels of line_kernels.cuh move them.
#pragma once

#include "collectives/line_steps.cuh"
#include "collectives/line_wire.cuh"
#include "collectives/words.h"

namespace te_graph::collectives {

__device__ inline bool has_empty(uint64_t word) {
    return static_cast<uint32_t>(word) == kEmptyWord || static_cast<uint32_t>(word >> 32) == kEmptyWord;
}
// With words that look empty replaced.
__device__ inline uint64_t filled(uint64_t word) {
    const auto low = static_cast<uint32_t>(word), high = static_cast<uint32_t>(word >> 32);
    return static_cast<uint64_t>(min(high, kNanWord)) << 32 | min(low, kNanWord);
}

struct alignas(16) TwoWords {
    uint64_t first, second;
};

// Data alone.
struct WordWire {
    // Wide blocks, so that what is sent at once keeps the links busy while sums of the turn before are made.
    static constexpr int threads(int world) { return world == 2 ? 1024 : 512; }
    static constexpr int kAhead = 1;
    static constexpr int kMostLines = 1;

    __device__ static int64_t slot_bytes(const Peers& peers) { return peers.data_slot_bytes; }
    __device__ static char* inbox(const Peers& peers, int rank) { return peers.data(rank); }

    static constexpr bool kSaysHello = true;
    // A line with a flag to each peer for this block, and for blocks that peers have and this rank has not.
    template <int kWorld>
    __device__ static void say_hello(const Peers& peers, const Turn& turn) {
        const int others = world_of<kWorld>(peers) - 1;
        const int lines = others * (kMaxBlocks / static_cast<int>(gridDim.x));
        if (turn.failed() || threadIdx.x / 8 >= lines) return;
        const int64_t half = turn.half(LineWire::slot_bytes(peers));
#pragma unroll 1
        for (int i = threadIdx.x / 8; i < lines; i += blockDim.x / 8) {
            const int block = blockIdx.x + i / others * gridDim.x;
            char* const slot = slot_of<LineWire>(peers, peers.rank, peer_of_slot(i % others, peers.rank)) + half;
            LineWire::send(part_of(slot) + block * kLineBytes, {}, turn.flag());
        }
    }
    // Each warp hears all peers before it takes data, which would else be that of whatever they do. look(): called
    // before each look at what they said.
    template <typename Look>
    __device__ static void hear_hellos(const Peers& peers, Turn& turn, const Look& look) {
        look();
        if (turn.failed()) return;
        const char* const hellos = part_of(LineWire::inbox(peers, peers.rank)) +
                                   turn.half(LineWire::slot_bytes(peers)) + blockIdx.x * kLineBytes;
        while (true) {
            bool is_missing = false;
            int missing_slot = 0;
            uint64_t seen = 0;
#pragma unroll 1
            for (int i = threadIdx.x % 32 / 8; i < peers.world - 1; i += kLinesPerWarp) {
                const Part part = look_at_part(hellos + i * peers.line_slot_bytes);
                if (!LineWire::is_missing(part, turn.flag())) continue;
                is_missing = true;
                missing_slot = i;
                seen = part.second;
            }
            if (!__any_sync(~0u, is_missing)) break;
            if (!turn.goes_on(is_missing, seen, peer_of_slot(missing_slot, peers.rank))) return;
            look();
        }
        turn.came();
    }

    // In data, of what this lane has of a line.
    __device__ static int64_t offset_of(int64_t line) { return line * kLineBytes + 16 * place_in_line(); }
    __device__ static Part load(const char* begin, int64_t bytes, int64_t line) {
        const int64_t offset = offset_of(line), left = bytes - offset;
        if (reinterpret_cast<uintptr_t>(begin) % 16 == 0 && left >= 16) {
            const TwoWords words = *reinterpret_cast<const TwoWords*>(begin + offset);
            return {filled(words.first), filled(words.second)};
        }
        return {filled(load_odd_word(begin + offset, left)), filled(load_odd_word(begin + offset + 8, left - 8))};
    }
    __device__ static void store(char* begin, int64_t bytes, int64_t line, const Part& part) {
        const int64_t offset = offset_of(line), left = bytes - offset;
        if (reinterpret_cast<uintptr_t>(begin) % 16 == 0 && left >= 16) {
            *reinterpret_cast<TwoWords*>(begin + offset) = {part.first, part.second};
        } else {
            store_odd_word(begin + offset, left, part.first);
            store_odd_word(begin + offset + 8, left - 8, part.second);
        }
    }
    // Sums of NaNs are another NaN than the empty word, and inputs were filled.
    __device__ static void send(char* place, const Part& part, uint64_t) {
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(part.first), "l"(part.second)
                     : "memory");
    }
    __device__ static Part look(const char* place) {
        Part part;
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(part.first), "=l"(part.second)
                     : "l"(place)
                     : "memory");
        return part;
    }
    __device__ static bool is_missing(const Part& part, uint64_t) {
        return has_empty(part.first) || has_empty(part.second);
    }
    __device__ static uint64_t flag_of(const Part&) { return 0; }
    __device__ static void take(char* place) {
        asm volatile("st.global.v2.u64 [%0], {%1, %1};" ::"l"(place), "l"(kEmpty) : "memory");
    }
};

}  // namespace te_graph::collectives
