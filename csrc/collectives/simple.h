// The simple protocol of large all-gathers, as in NCCL: chunks of 16 KB of plain data, each followed by a fence and one
// flag. A rank announces in a handshake where its output is; outputs in its memory pool are written by the peers
// directly, others are copied from the receive buffer.
//
// Chunks share the data slots with the Lamport protocol, so the receiver puts sentinels back after a copy. Flags have
// slots of their own, where there is never data. Double buffering is that of ll128.h. The handshake is the first line
// of the LL128 slot, where a rank that runs another operation finds this one's flag.
#pragma once

#include "collectives/lamport.h"

namespace te_graph::collectives {

constexpr int kChunkBytes = 16 << 10;

// Chunks that a data slot and a flag slot have room for.
constexpr int64_t chunks_of_slots(int64_t data_bytes, int64_t flag_bytes) {
    const int64_t chunks = data_bytes / kChunkBytes, flags = flag_bytes / static_cast<int64_t>(sizeof(uint64_t));
    return chunks < flags ? chunks : flags;
}

// Number of blocks for `chunks` chunks: a power of two, at most `most`, which is one.
constexpr int blocks_for_chunks(int64_t chunks, int most) {
    int blocks = 1;
    while (blocks < most && blocks < chunks) blocks *= 2;
    return blocks;
}

#ifdef TE_GRAPH_CUDA
// Algorithm kAllGather.
cudaError_t launch_simple(const Peers& peers, const LaunchArgs& args, cudaStream_t stream);
#endif

}  // namespace te_graph::collectives
