// The LL128 protocol, as in NCCL: data and flag share a 128-byte line, which is stored and loaded by one instruction of
// eight lanes, so a line whose flag has arrived is complete. No barrier and no registration: data is sent from any
// memory, and a kernel waits for the data alone.
//
// A line holds 15 words of 8 bytes and its flag (signature.h). The receive buffer of a rank is double-buffered: one
// half for even and one for odd sequence numbers. A rank that runs operation s + 2 has finished s + 1, for which it
// needed lines of all peers, so all of them have finished s: what is overwritten has been read.
#pragma once

#include "collectives/peers.h"

namespace te_graph::collectives {

constexpr int kLineBytes = 128;
constexpr int kWordsPerLine = 15;
constexpr int kLineData = kWordsPerLine * 8;

// Bytes of a slot that so many lines need, of this protocol or the Lamport one.
constexpr int64_t slot_bytes_for(Algorithm algorithm, int64_t lines) {
    return lines * kLineBytes * (algorithm == Algorithm::kTwoShot ? 2 : 1);
}

// Number of blocks for `lines` lines: a power of two, at most `most`, which is one.
int blocks_for_lines(int64_t lines, int most);

#ifdef TE_GRAPH_CUDA
cudaError_t launch_ll128(const Peers& peers, const LaunchArgs& args, cudaStream_t stream);
// Whether kernels of this build wait for their predecessor on the current device, as LaunchArgs::starts_early requires.
bool can_start_early();
#endif

}  // namespace te_graph::collectives
