// Which algorithm serves an operation, by size alone, so that all ranks choose alike and a graph or trace freezes
// nothing. No Torch.
#pragma once

#include <cstdint>

#include "collectives/tiles.h"
#include "collectives/words.h"

namespace te_graph::collectives {

struct Tuning {
    int64_t one_step_bytes = INT64_MAX;  // all-reduces up to here are done in one step, larger ones in two
    // Of what a rank sends to each other in a step.
    int64_t line_bytes = INT64_MAX;         // reductions up to here go by lines, larger ones by words
    int64_t gather_line_bytes = INT64_MAX;  // all-gathers up to here go by lines, larger ones by tiles
    int32_t blocks = kMaxBlocks;            // at most, a power of two
};

// Found by benchmarks/bench_collectives.py on H200s: for H100s too, whose links are the same.
constexpr Tuning default_tuning(int world) {
    // Two ranks send as much in one step as in two, but sums sent on in two overlap with what is still to come.
    if (world <= 2) return {.one_step_bytes = 1 << 20, .line_bytes = 640 << 10, .gather_line_bytes = 4 << 20};
    if (world <= 4) return {.one_step_bytes = 256 << 10, .line_bytes = 256 << 10, .gather_line_bytes = 4 << 20};
    return {.one_step_bytes = 192 << 10, .line_bytes = 128 << 10, .gather_line_bytes = 2 << 20};
}

// How the memory that peers write is divided: slots of `slots` senders for lines, for words and tiles, and for their
// flags.
struct SlotBytes {
    int64_t lines, data, flags;
};
constexpr SlotBytes divide_inbox(int64_t inbox_bytes, int64_t slots) {
    constexpr int64_t kMostLines = 8 << 20;
    const auto whole_lines = [](int64_t bytes) { return bytes / kLineBytes * kLineBytes; };
    const int64_t slot = whole_lines((inbox_bytes - static_cast<int64_t>(sizeof(Mailbox))) / slots);
    const int64_t quarter = whole_lines(slot / 4), lines = quarter < kMostLines ? quarter : kMostLines;
    // A flag for each tile, and a line at least.
    const int64_t flags =
        whole_lines((slot - lines) / kTileBytes * static_cast<int64_t>(sizeof(uint64_t))) + kLineBytes;
    return {lines, slot - lines - flags, flags};
}

// The launches that an operation comes to.
enum class Way : uint8_t { kLines, kWords, kTiles };
struct Split {
    Steps steps;
    Way way;
    int64_t count;  // of lines or tiles of each piece that a launch can do
};
constexpr int64_t unit_bytes(Way way) {
    return way == Way::kLines ? kLineData : way == Way::kWords ? kLineBytes : kTileBytes;
}
constexpr int64_t units_in(Way way, int64_t bytes) { return (bytes + unit_bytes(way) - 1) / unit_bytes(way); }
// That a slot has room for. Not more than kernels count in 32 bits, sums behind what is summed included.
constexpr int64_t units_of_slot(Way way, Steps steps, const SlotBytes& slots) {
    constexpr int64_t kMost = 1 << 29;
    const int64_t units = way == Way::kTiles
                              ? tiles_of_slots(slots.data, slots.flags)
                              : (way == Way::kLines ? slots.lines : slots.data) / line_slot_bytes_for(steps, 1);
    return units < kMost ? units : kMost;
}
// bytes: of the larger one of input and output.
constexpr Split split_of(Op op, int64_t bytes, int world, const SlotBytes& slots, const Tuning& tuning) {
    const Steps steps = op == Op::kAllGather            ? Steps::kSend
                        : op == Op::kReduceScatter      ? Steps::kScatter
                        : bytes > tuning.one_step_bytes ? Steps::kReduceSend
                                                        : Steps::kReduce;
    const int64_t sent = steps == Steps::kReduce ? bytes : bytes / world;
    Way way = Way::kLines;
    if (op == Op::kAllGather) {
        if (sent > tuning.gather_line_bytes) way = Way::kTiles;
    } else if (sent > tuning.line_bytes && slots.lines >= kMaxBlocks * kLineBytes) {
        // Each block sends a line, too.
        way = Way::kWords;
    }
    if (units_of_slot(way, steps, slots) == 0) way = Way::kLines;
    return {steps, way, units_of_slot(way, steps, slots)};
}

}  // namespace te_graph::collectives
