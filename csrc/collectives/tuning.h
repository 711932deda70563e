// Selection of algorithm and protocol, by op and size alone, so that all ranks select the same ones and graphs or
// traces freeze nothing. No Torch.
#pragma once

#include <cstdint>

#include "collectives/protocols.h"

namespace te_graph::collectives {

struct Tuning {
    int64_t one_shot_bytes = INT64_MAX;  // all-reduces up to here are one-shot, larger ones two-shot
    // Bytes that a rank sends to each peer in a phase.
    int64_t ll128_bytes = INT64_MAX;         // reductions up to here: LL128, larger ones: Lamport
    int64_t gather_ll128_bytes = INT64_MAX;  // all-gathers up to here: LL128, larger ones: simple
    int32_t blocks = kMaxBlocks;             // at most, a power of two
};

// Measured by benchmarks/bench_collectives.py on H200s; H100s have the same links.
constexpr Tuning default_tuning(int world) {
    // Two ranks send as much in one shot as in two, but the phases of two shots overlap.
    if (world <= 2) return {.one_shot_bytes = 1 << 20, .ll128_bytes = 640 << 10, .gather_ll128_bytes = 4 << 20};
    if (world <= 4) return {.one_shot_bytes = 256 << 10, .ll128_bytes = 256 << 10, .gather_ll128_bytes = 4 << 20};
    return {.one_shot_bytes = 192 << 10, .ll128_bytes = 128 << 10, .gather_ll128_bytes = 2 << 20};
}

// Division of a receive buffer: slots of `slots` senders for LL128 lines, for data (Lamport and simple) and for flags
// (simple).
struct SlotBytes {
    int64_t ll128, data, flags;
};
constexpr SlotBytes divide_receive_buffer(int64_t receive_buffer_bytes, int64_t slots) {
    constexpr int64_t kMaxLL128 = 8 << 20;
    const auto whole_lines = [](int64_t bytes) { return bytes / kLineBytes * kLineBytes; };
    const int64_t slot = whole_lines((receive_buffer_bytes - static_cast<int64_t>(sizeof(SignalPad))) / slots);
    const int64_t quarter = whole_lines(slot / 4), ll128 = quarter < kMaxLL128 ? quarter : kMaxLL128;
    // A flag for each chunk, and a line at least.
    const int64_t flags =
        whole_lines((slot - ll128) / kChunkBytes * static_cast<int64_t>(sizeof(uint64_t))) + kLineBytes;
    return {ll128, slot - ll128 - flags, flags};
}

enum class Protocol : uint8_t { kLL128, kLamport, kSimple };
// Algorithm and protocol of an operation, and how much of it a launch can do.
struct Selection {
    Algorithm algorithm;
    Protocol protocol;
    int64_t count;  // lines or chunks of each piece per launch
};
constexpr int64_t unit_bytes(Protocol protocol) {
    return protocol == Protocol::kLL128 ? kLineData : protocol == Protocol::kLamport ? kLineBytes : kChunkBytes;
}
constexpr int64_t units_in(Protocol protocol, int64_t bytes) {
    return (bytes + unit_bytes(protocol) - 1) / unit_bytes(protocol);
}
// Lines or chunks that a slot has room for, limited to what kernels count in 32 bits with two-shot sums included.
constexpr int64_t units_of_slot(Protocol protocol, Algorithm algorithm, const SlotBytes& slots) {
    constexpr int64_t kMaxUnits = 1 << 29;
    const int64_t units = protocol == Protocol::kSimple ? chunks_of_slots(slots.data, slots.flags)
                                                        : (protocol == Protocol::kLL128 ? slots.ll128 : slots.data) /
                                                              slot_bytes_for(algorithm, 1);
    return units < kMaxUnits ? units : kMaxUnits;
}
// bytes: of the larger of input and output.
constexpr Selection select_for(Op op, int64_t bytes, int world, const SlotBytes& slots, const Tuning& tuning) {
    const Algorithm algorithm = op == Op::kAllGather            ? Algorithm::kAllGather
                                : op == Op::kReduceScatter      ? Algorithm::kReduceScatter
                                : bytes > tuning.one_shot_bytes ? Algorithm::kTwoShot
                                                                : Algorithm::kOneShot;
    const int64_t sent = algorithm == Algorithm::kOneShot ? bytes : bytes / world;
    Protocol protocol = Protocol::kLL128;
    if (op == Op::kAllGather) {
        if (sent > tuning.gather_ll128_bytes) protocol = Protocol::kSimple;
    } else if (sent > tuning.ll128_bytes && slots.ll128 >= kMaxBlocks * kLineBytes) {
        // Each block sends an LL128 line as its handshake.
        protocol = Protocol::kLamport;
    }
    if (units_of_slot(protocol, algorithm, slots) == 0) protocol = Protocol::kLL128;
    return {algorithm, protocol, units_of_slot(protocol, algorithm, slots)};
}

}  // namespace te_graph::collectives
