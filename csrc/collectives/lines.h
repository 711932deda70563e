// Operations by lines: data and flag in the same 128 bytes, so that a line that has come is complete, and nobody waits for
// anything but the data itself. No barrier, no registration: any memory is sent from where it lies.
//
// A line bears 15 words of 8 bytes and its flag (signal.h). The inbox of a rank has a half for even and one for odd sequence
// numbers. A rank that runs operation s + 2 has finished s + 1, for which it needed lines of all peers, so they have
// finished s: what is overwritten has been read.
//
//     kReduce      all-reduce in one step: each rank sends all to all and sums what it gets
//     kScatter     reduce-scatter: each rank sends piece p to rank p and sums what it gets
//     kReduceSend  all-reduce in two steps: the same, and each rank sends its sum to all
//     kSend        all-gather
#pragma once

#include "collectives/peers.h"

namespace te_graph::collectives {

constexpr int kLineBytes = 128;
constexpr int kWordsPerLine = 15;
constexpr int kLineData = kWordsPerLine * 8;

constexpr int64_t lines_in(int64_t bytes) { return (bytes + kLineData - 1) / kLineData; }

// Memory in pieces, one per rank: piece p begins at p * stride and ends after `piece` bytes or with the whole.
// stride 0: each piece is the whole.
template <typename Byte>
struct Pieces {
    Byte* data;
    int64_t bytes;
    int64_t stride;
    int64_t piece;

    TE_GRAPH_ANYWHERE Byte* begin(int p) const { return data + p * stride; }
    TE_GRAPH_ANYWHERE int64_t size(int p) const {
        const int64_t left = bytes - p * stride;
        return left < 0 ? 0 : left < piece ? left : piece;
    }
};

enum class Steps : uint8_t { kReduce, kScatter, kReduceSend, kSend };

struct LineJob {
    Pieces<const char> input;  // kReduce, kSend: one piece
    Pieces<char> out;          // kReduce, kScatter: one piece
    uint64_t signature;
    int64_t lines;  // in a piece
    int32_t launch;
    int32_t blocks;
    Steps steps;
    Element element;
    Reduction reduction;
};

// Bytes of a slot that a job needs.
constexpr int64_t slot_bytes_for(Steps steps, int64_t lines) {
    return lines * kLineBytes * (steps == Steps::kReduceSend ? 2 : 1);
}

// A power of two, enough for `lines` and not above `most`, which is one.
int blocks_for(int64_t lines, int most);

#ifdef TE_GRAPH_CUDA
cudaError_t launch_lines(const Peers& peers, const LineJob& job, cudaStream_t stream);
#endif

}  // namespace te_graph::collectives
