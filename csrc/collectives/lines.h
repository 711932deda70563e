// Operations by lines: data and flag in the same 128 bytes, so that a line that has come is complete, and nobody waits
// for anything but the data itself. No barrier, no registration: any memory is sent from where it lies.
//
// A line bears 15 words of 8 bytes and its flag (signal.h). The inbox of a rank has a half for even and one for odd
// sequence numbers. A rank that runs operation s + 2 has finished s + 1, for which it needed lines of all peers, so
// they have finished s: what is overwritten has been read.
#pragma once

#include "collectives/peers.h"

namespace te_graph::collectives {

constexpr int kLineBytes = 128;
constexpr int kWordsPerLine = 15;
constexpr int kLineData = kWordsPerLine * 8;

// Bytes of a slot that a job needs.
constexpr int64_t line_slot_bytes_for(Steps steps, int64_t lines) {
    return lines * kLineBytes * (steps == Steps::kReduceSend ? 2 : 1);
}

// A power of two that is good for `lines`, and not above `most`, which is one.
int line_blocks_for(int64_t lines, int most);

#ifdef TE_GRAPH_CUDA
cudaError_t launch_lines(const Peers& peers, const Job& job, cudaStream_t stream);
// Whether kernels of this build wait for their predecessor on the current device: only then may a job start early.
bool can_start_early();
#endif

}  // namespace te_graph::collectives
