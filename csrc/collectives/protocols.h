// The protocols by which data is sent to peers, which of them an operation takes, and the launchers of the kernels.
// No Torch.
#pragma once

#include "collectives/peers.h"

namespace te_graph::collectives {

// The LL128 protocol, as in NCCL: data and flag share a 128-byte line, which is stored and loaded by one instruction of
// eight lanes, so a line whose flag has arrived is complete. No barrier and no registration: data is sent from any
// memory, and a kernel waits for the data alone.
//
// A line holds 15 words of 8 bytes and its flag (fingerprint.h). The receive buffer of a rank is double-buffered: one
// half for even and one for odd sequence numbers. A rank that runs operation s + 2 has finished s + 1, for which it
// needed lines of all peers, so all of them have finished s: what is overwritten has been read.

constexpr int kLineBytes = 128;
constexpr int kWordsPerLine = 15;
constexpr int kLinesPerWarp = 4;
constexpr int kLineData = kWordsPerLine * 8;

// Bytes of a slot that so many lines need, of this protocol or the Lamport one.
constexpr int64_t slot_bytes_for(Algorithm algorithm, int64_t lines) {
    return lines * kLineBytes * (algorithm == Algorithm::kTwoShot ? 2 : 1);
}

// Threads of each of `blocks` blocks that transfer `lines` lines in so many iterations, as even as possible.
constexpr int threads_for(int64_t lines, int blocks, int64_t iterations) {
    const int64_t lines_per_warp = iterations * blocks * kLinesPerWarp;
    return 32 * static_cast<int>((lines + lines_per_warp - 1) / lines_per_warp);
}

// Number of blocks for `lines` lines: a power of two, at most `max_blocks`, which is one.
int blocks_for_lines(int64_t lines, int max_blocks);

// The Lamport protocol of large reductions, as in FlashInfer and TensorRT-LLM: nothing but data on the wire, neither
// flag nor fence. Receive buffers are filled with a sentinel word that data never has, so any other word is data; the
// receiver puts the sentinel back for the operation after the next (double buffering as in LL128). Each block sends its
// counterpart on each peer a handshake, one LL128 line with the flag, so that a peer that runs another operation is
// detected before its data is used.
//
// The sentinel is a NaN of each format, twice for those of two bytes. Data that equals it is sent as another NaN: sums
// are NaN all the same, and their bits do not depend on those of a NaN operand.

constexpr uint32_t kSentinelWord = 0xFFFFFFFF;
constexpr uint64_t kSentinel = static_cast<uint64_t>(kSentinelWord) << 32 | kSentinelWord;
constexpr int kSentinelByte = 0xFF;
// Also a NaN of each format, and the largest word below the sentinel, so that a minimum replaces the sentinel by it.
constexpr uint32_t kNanWord = kSentinelWord - 1;

// LamportBf16 is the same protocol for fp32 tensors that are sent as bf16: a line has 64 elements, 256 bytes of the
// tensor. It serves reductions of every size; all-reduces are two-shot.

// The simple protocol of large all-gathers, as in NCCL: chunks of 16 KB of plain data, each followed by a fence and one
// flag. A rank announces in a handshake where its output is; outputs in its memory pool are written by the peers
// directly, others are copied from the receive buffer.
//
// Chunks share the data slots with the Lamport protocol, so the receiver puts sentinels back after a copy. Flags have
// slots of their own, where there is never data. Double buffering is that of LL128. The handshake is the first line of
// the LL128 slot, where a rank that runs another operation finds this one's flag.

constexpr int kChunkBytes = 16 << 10;

// Chunks that a data slot and a flag slot have room for.
constexpr int64_t chunks_of_slots(int64_t data_bytes, int64_t flag_bytes) {
    const int64_t chunks = data_bytes / kChunkBytes, flags = flag_bytes / static_cast<int64_t>(sizeof(uint64_t));
    return chunks < flags ? chunks : flags;
}

// Number of blocks for `chunks` chunks: a power of two, at most `max_blocks`, which is one.
constexpr int blocks_for_chunks(int64_t chunks, int max_blocks) {
    int blocks = 1;
    while (blocks < max_blocks && blocks < chunks) blocks *= 2;
    return blocks;
}

// Algorithm and protocol are selected by op and size alone, so that all ranks select the same ones and graphs or traces
// freeze nothing.

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

enum class Protocol : uint8_t { kLL128, kLamport, kSimple, kLamportBf16 };
// Algorithm and protocol of an operation, and how much of it a launch can do.
struct Selection {
    Algorithm algorithm;
    Protocol protocol;
    int64_t count;  // lines or chunks of each piece per launch
};
// Of a tensor, in a line or chunk.
constexpr int64_t unit_bytes(Protocol protocol) {
    constexpr int64_t kBytes[] = {kLineData, kLineBytes, kChunkBytes, 2 * kLineBytes};
    return kBytes[static_cast<int>(protocol)];
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
// Whether LL128 slots have a line of each block, which is its handshake in the Lamport protocols.
constexpr bool has_handshakes(const SlotBytes& slots) { return slots.ll128 >= kMaxBlocks * kLineBytes; }

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
    } else if (sent > tuning.ll128_bytes && has_handshakes(slots)) {
        protocol = Protocol::kLamport;
    }
    if (units_of_slot(protocol, algorithm, slots) == 0) protocol = Protocol::kLL128;
    return {algorithm, protocol, units_of_slot(protocol, algorithm, slots)};
}
// Of a reduction that sends fp32 as bf16. No units: the receive buffer is too small.
constexpr Selection select_bf16_for(Op op, const SlotBytes& slots) {
    const Algorithm algorithm = op == Op::kReduceScatter ? Algorithm::kReduceScatter : Algorithm::kTwoShot;
    constexpr Protocol kProtocol = Protocol::kLamportBf16;
    return {algorithm, kProtocol, has_handshakes(slots) ? units_of_slot(kProtocol, algorithm, slots) : 0};
}

#ifdef TE_GRAPH_CUDA
cudaError_t launch_ll128(const Peers& peers, const LaunchArgs& args, cudaStream_t stream);
// Whether kernels of this build wait for their predecessor on the current device, as LaunchArgs::starts_early requires.
bool can_start_early();

// All algorithms but kAllGather. An LL128 slot has to have room for a line of each block.
cudaError_t launch_lamport(const Peers& peers, const LaunchArgs& args, cudaStream_t stream);
// Of fp32 tensors that are sent as bf16: algorithms kTwoShot and kReduceScatter.
cudaError_t launch_lamport_bf16(const Peers& peers, const LaunchArgs& args, cudaStream_t stream);

// Algorithm kAllGather.
cudaError_t launch_simple(const Peers& peers, const LaunchArgs& args, cudaStream_t stream);
#endif

// For data moved by a process group: out[i] = (row_0[i] + row_1[i] + ...) * scale (or the largest), with the arithmetic
// of the kernels, in fp32, in row order, rounded once, to the elements of out.

struct Rows {
    const void* rows;  // [ranks, columns]
    void* out;         // [columns]
    int64_t columns;
    int32_t ranks;
    Element element;      // of rows; no bytes
    Element out_element;  // the same, or fp32 for sums of bf16
    Reduction reduction;
    bool is_rounded;            // sums are rounded to elements of rows before
    float scale;                // of sums, as LaunchArgs has them
    const float* scale_tensor;  // [1], or null
};

void reduce_rows_cpu(const Rows& rows);

#ifdef TE_GRAPH_CUDA
cudaError_t launch_reduce_rows(const Rows& rows, cudaStream_t stream);
#endif

}  // namespace te_graph::collectives
