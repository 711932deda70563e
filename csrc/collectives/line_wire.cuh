// Lines as the kernels of line_kernels.cuh move them.
#pragma once

#include "collectives/lines.cuh"

namespace te_graph::collectives {

// Data and flag in a line.
struct LineWire {
    // Of the kernel that loops, and turns that a warp sends before it waits for what came of the first one: so the
    // links stay busy while sums are made.
    static constexpr int threads(int) { return 512; }
    static constexpr int kAhead = 4;
    // That a thread has in kernels that do not loop.
    static constexpr int kMostLines = 4;

    __device__ static int64_t slot_bytes(const Peers& peers) { return peers.line_slot_bytes; }
    __device__ static char* inbox(const Peers& peers, int rank) { return peers.lines(rank); }
    // A line says itself of which operation it is.
    static constexpr bool kSaysHello = false;
    template <int kWorld>
    __device__ static void say_hello(const Peers&, const Turn&) {}
    template <typename Look>
    __device__ static void hear_hellos(const Peers&, Turn&, const Look& look) {
        look();
    }
    __device__ static int64_t offset_of(int64_t line) { return offset_of_part(line); }
    __device__ static Part load(const char* begin, int64_t bytes, int64_t line) {
        return load_part(begin, bytes, line);
    }
    __device__ static void store(char* begin, int64_t bytes, int64_t line, const Part& part) {
        store_part(begin, bytes, line, part);
    }
    __device__ static void send(char* place, const Part& part, uint64_t flag) { send_part(place, part, flag); }
    __device__ static Part look(const char* place) { return look_at_part(place); }
    __device__ static bool is_missing(const Part& part, uint64_t flag) { return has_flag() && part.second != flag; }
    __device__ static uint64_t flag_of(const Part& part) { return part.second; }
    __device__ static void take(char*) {}
};

}  // namespace te_graph::collectives
