// Lines on the device: words of memory that begins anywhere, and lines that are sent and awaited.
#pragma once

#include "collectives/lines.h"
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

// What is at an end, or begins at no multiple of 8. Not inlined: rare, and code would be several times as large.
__device__ inline __noinline__ uint64_t load_some(const char* place, int64_t left) {
    if (left <= 0) return 0;
    const int count = left < 8 ? static_cast<int>(left) : 8;
    return with_unit(place, count, [&]<typename Unit>() { return load_units<Unit>(place, count); });
}
__device__ inline __noinline__ void store_some(char* place, int64_t left, uint64_t word) {
    if (left <= 0) return;
    const int count = left < 8 ? static_cast<int>(left) : 8;
    with_unit(place, count, [&]<typename Unit>() { store_units<Unit>(place, count, word); });
}

// Word w of `bytes` bytes that begin anywhere; what lies behind them is 0.
__device__ inline uint64_t load_word(const char* begin, int64_t bytes, int64_t w) {
    const char* const place = begin + 8 * w;
    const int64_t left = bytes - 8 * w;
    if (left >= 8 && reinterpret_cast<uintptr_t>(place) % 8 == 0) return *reinterpret_cast<const uint64_t*>(place);
    return load_some(place, left);
}
__device__ inline void store_word(char* begin, int64_t bytes, int64_t w, uint64_t word) {
    char* const place = begin + 8 * w;
    const int64_t left = bytes - 8 * w;
    if (left >= 8 && reinterpret_cast<uintptr_t>(place) % 8 == 0) {
        *reinterpret_cast<uint64_t*>(place) = word;
    } else {
        store_some(place, left, word);
    }
}

// What a lane has of a line: two words, or in every eighth lane one and the flag.
struct Part {
    uint64_t first, second;
};
constexpr int kLinesPerWarp = 4;
__device__ inline int place_in_line() { return threadIdx.x % 8; }
__device__ inline bool has_flag() { return place_in_line() == 7; }

__device__ inline Part load_part(const char* begin, int64_t bytes, int64_t line) {
    const int64_t word = line * kWordsPerLine + 2 * place_in_line();
    return {load_word(begin, bytes, word), has_flag() ? 0 : load_word(begin, bytes, word + 1)};
}
__device__ inline void store_part(char* begin, int64_t bytes, int64_t line, const Part& part) {
    const int64_t word = line * kWordsPerLine + 2 * place_in_line();
    store_word(begin, bytes, word, part.first);
    if (!has_flag()) store_word(begin, bytes, word + 1, part.second);
}

// One instruction of a warp writes whole lines, and NVLink and L2 keep a line's 128 bytes together.
__device__ inline void send_part(char* inbox, int64_t line, const Part& part, uint64_t flag) {
    char* const place = inbox + line * kLineBytes + 16 * place_in_line();
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(part.first),
                 "l"(has_flag() ? flag : part.second)
                 : "memory");
}
__device__ inline Part look_at_part(const char* inbox, int64_t line) {
    const char* const place = inbox + line * kLineBytes + 16 * place_in_line();
    Part part;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(part.first), "=l"(part.second)
                 : "l"(place)
                 : "memory");
    return part;
}

}  // namespace te_graph::collectives
