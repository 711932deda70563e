// Which algorithm serves an operation, by size alone, so that all ranks choose alike and a graph or trace freezes nothing.
// No Torch.
#pragma once

#include <cstdint>

#include "collectives/tiles.h"

namespace te_graph::collectives {

struct Tuning {
    int64_t one_step_bytes = INT64_MAX;  // all-reduces up to here are done in one step, larger ones in two
    int64_t line_bytes = INT64_MAX;      // operations up to here go by lines, larger ones by tiles; of the larger side
    int32_t line_blocks = kMaxBlocks;    // at most, powers of two
    int32_t tile_blocks = kMaxBlocks;
};

// Found by benchmarks/bench_collectives.py on H200s: for H100s too, whose links are the same.
constexpr Tuning default_tuning(int world) {
    // Two ranks send the same number of bytes either way.
    if (world <= 2) return {.line_bytes = 4 << 20};
    return {.one_step_bytes = world <= 4 ? 512 << 10 : 192 << 10, .line_bytes = 4 << 20};
}

// How the memory that peers write is divided: slots of `slots` senders, for lines and for tiles.
struct SlotBytes {
    int64_t lines, tiles;
};
constexpr SlotBytes divide_inbox(int64_t inbox_bytes, int64_t slots) {
    constexpr int64_t kMostLines = 8 << 20;
    const int64_t slot = (inbox_bytes - static_cast<int64_t>(sizeof(Mailbox))) / slots / kLineBytes * kLineBytes;
    const int64_t lines = slot / 4 < kMostLines ? slot / 4 / kLineBytes * kLineBytes : kMostLines;
    return {lines, slot - lines};
}

// The launches that an operation comes to.
struct Split {
    Steps steps;
    bool by_tiles;
    int64_t count;  // of lines or tiles of each piece that a launch can do
};
// bytes: of the larger one of input and output.
constexpr Split split_of(Op op, int64_t bytes, const SlotBytes& slots, const Tuning& tuning) {
    const Steps steps = op == Op::kAllGather            ? Steps::kSend
                        : op == Op::kReduceScatter      ? Steps::kScatter
                        : bytes > tuning.one_step_bytes ? Steps::kReduceSend
                                                        : Steps::kReduce;
    const int64_t tiles = tiles_of_slot(slots.tiles) / slot_tiles_for(steps, 1);
    if (bytes > tuning.line_bytes && tiles > 0) return {steps, true, tiles};
    return {steps, false, slots.lines / line_slot_bytes_for(steps, 1)};
}

}  // namespace te_graph::collectives
