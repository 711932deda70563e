// Lines on the device: words of memory that begins anywhere, and lines that are sent and awaited.
#pragma once

#include "collectives/course.h"
#include "collectives/wait.cuh"

namespace te_graph::collectives {

template <typename Unit>
__device__ uint64_t load_units(const char* place, int bytes) {
    uint64_t word = 0;
    for (int i = 0; i < bytes; i += sizeof(Unit)) {
        word |= static_cast<uint64_t>(*reinterpret_cast<const Unit*>(place + i)) << (8 * i);
    }
    return word;
}
template <typename Unit>
__device__ void store_units(char* place, int bytes, uint64_t word) {
    for (int i = 0; i < bytes; i += sizeof(Unit))
        *reinterpret_cast<Unit*>(place + i) = static_cast<Unit>(word >> (8 * i));
}

// Calls function.operator()<Unit>() with the largest type up to 4 bytes that place and length are multiples of.
template <typename Function>
__device__ auto with_unit(const char* place, int bytes, const Function& function) {
    const auto odd = reinterpret_cast<uintptr_t>(place) | static_cast<uintptr_t>(bytes);
    if (odd % 4 == 0) return function.template operator()<uint32_t>();
    if (odd % 2 == 0) return function.template operator()<uint16_t>();
    return function.template operator()<uint8_t>();
}

// Up to 8 of `left` bytes from `place` on, which may begin anywhere; what lies behind them is 0.
__device__ inline uint64_t load_some(const char* place, int64_t left) {
    if (left <= 0) return 0;
    const int count = left < 8 ? static_cast<int>(left) : 8;
    return with_unit(place, count, [&]<typename Unit>() { return load_units<Unit>(place, count); });
}
__device__ inline void store_some(char* place, int64_t left, uint64_t word) {
    if (left <= 0) return;
    const int count = left < 8 ? static_cast<int>(left) : 8;
    with_unit(place, count, [&]<typename Unit>() { store_units<Unit>(place, count, word); });
}

// What a lane has of a line: two words, or in every eighth lane one and the flag.
struct Part {
    uint64_t first, second;
};
__device__ inline int place_in_line() { return threadIdx.x % 8; }
__device__ inline bool has_flag() { return place_in_line() == 7; }

// Words at an end, or of memory that begins at no multiple of 8. Not inlined: rare, and what is inlined shall be small.
__device__ inline __noinline__ uint64_t load_odd_word(const char* place, int64_t left) {
    return load_some(place, left);
}
__device__ inline __noinline__ void store_odd_word(char* place, int64_t left, uint64_t word) {
    store_some(place, left, word);
}
// Eight bytes of `left` from `place` on.
__device__ inline uint64_t load_word(const char* place, int64_t left, bool is_aligned) {
    if (left <= 0) return 0;
    return is_aligned && left >= 8 ? *reinterpret_cast<const uint64_t*>(place) : load_odd_word(place, left);
}
__device__ inline void store_word(char* place, int64_t left, bool is_aligned, uint64_t word) {
    if (left <= 0) return;
    if (is_aligned && left >= 8) {
        *reinterpret_cast<uint64_t*>(place) = word;
    } else {
        store_odd_word(place, left, word);
    }
}

// In data, of what this lane has of a line.
__device__ inline int64_t offset_of_part(int64_t line) { return line * kLineData + 16 * place_in_line(); }
// Part of a line of `bytes` bytes that begin anywhere.
__device__ inline Part load_part(const char* begin, int64_t bytes, int64_t line) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 8 == 0;
    const int64_t offset = offset_of_part(line), left = bytes - offset;
    return {load_word(begin + offset, left, is_aligned),
            has_flag() ? 0 : load_word(begin + offset + 8, left - 8, is_aligned)};
}
__device__ inline void store_part(char* begin, int64_t bytes, int64_t line, const Part& part) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(begin) % 8 == 0;
    const int64_t offset = offset_of_part(line), left = bytes - offset;
    store_word(begin + offset, left, is_aligned, part.first);
    if (!has_flag()) store_word(begin + offset + 8, left - 8, is_aligned, part.second);
}

// What a lane has of the first line of a slot; those of other lines follow at kLineBytes.
template <typename Byte>
__device__ __forceinline__ Byte* part_of(Byte* slot) {
    return slot + 16 * place_in_line();
}

// The eight lanes of a line meet, so that one instruction moves the whole line. NVLink and L2 keep its 128 bytes
// together.
__device__ inline void meet_in_line() { __syncwarp(0xFFu << (threadIdx.x & 24)); }
__device__ inline void send_part(char* place, const Part& part, uint64_t flag) {
    const uint64_t second = has_flag() ? flag : part.second;
    meet_in_line();
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(part.first), "l"(second) : "memory");
}
__device__ inline Part look_at_part(const char* place) {
    Part part;
    meet_in_line();
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(part.first), "=l"(part.second)
                 : "l"(place)
                 : "memory");
    return part;
}

}  // namespace te_graph::collectives
