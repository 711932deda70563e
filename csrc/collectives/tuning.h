// Which algorithm serves an operation, by size alone, so that all ranks choose alike and a graph or trace freezes nothing.
// No Torch.
#pragma once

#include <cstdint>

#include "collectives/lines.h"

namespace te_graph::collectives {

struct Tuning {
    int64_t one_step_bytes = 0;  // all-reduces up to here are done in one step, larger ones in two
    int32_t blocks = 128;        // at most, a power of two
};

// Found by benchmarks/bench_collectives.py on H200s: for H100s too, whose links are the same.
constexpr Tuning default_tuning(int world) {
    // Two ranks send the same number of bytes either way.
    if (world <= 2) return {.one_step_bytes = INT64_MAX};
    return {.one_step_bytes = world <= 4 ? 512 << 10 : 192 << 10};
}

// The launches that an operation comes to: lines of each piece go through slots of `slot_bytes`.
struct Split {
    Steps steps;
    int64_t lines_per_launch;
};
constexpr Split split_of(Op op, int64_t bytes, int64_t slot_bytes, const Tuning& tuning) {
    const Steps steps = op == Op::kAllGather            ? Steps::kSend
                        : op == Op::kReduceScatter      ? Steps::kScatter
                        : bytes > tuning.one_step_bytes ? Steps::kReduceSend
                                                        : Steps::kReduce;
    return {steps, slot_bytes / slot_bytes_for(steps, 1)};
}

}  // namespace te_graph::collectives
