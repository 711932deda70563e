// Large all-gathers by tiles: 16 KB of data as it is, and one flag for all of it, so that nothing is sent but data. A
// rank says in a hello where its output lies, and where that is its pool, peers write there and nobody copies.
//
// Tiles lie where words do (words.h), so who has copied one puts empty words back. Flags have a place of their own,
// where there is never data. What lines.h says of halves holds here too. The hello is the first line of the slot for
// lines: a rank that is at another operation finds this one's flag there.
#pragma once

#include "collectives/words.h"

namespace te_graph::collectives {

constexpr int kTileBytes = 16 << 10;

// Tiles that slots for data and for flags have room for.
constexpr int64_t tiles_of_slots(int64_t data_bytes, int64_t flag_bytes) {
    const int64_t tiles = data_bytes / kTileBytes, flags = flag_bytes / static_cast<int64_t>(sizeof(uint64_t));
    return tiles < flags ? tiles : flags;
}

// A power of two, enough for `tiles` and not above `most`, which is one.
constexpr int tile_blocks_for(int64_t tiles, int most) {
    int blocks = 1;
    while (blocks < most && blocks < tiles) blocks *= 2;
    return blocks;
}

#ifdef TE_GRAPH_CUDA
// Of steps kSend.
cudaError_t launch_tiles(const Peers& peers, const Job& job, cudaStream_t stream);
#endif

}  // namespace te_graph::collectives
