// Large all-gathers by tiles: 16 KB of data as it is, and one flag for all of it, so that nothing is sent but data. A rank
// says in a hello where its output lies, and where that is its pool, peers write there and nobody copies.
//
// A slot of a sender: flags, then tiles. What lines.h says of halves holds here too; lines, words and tiles have inboxes of
// their own, so that no data is ever where flags are looked for. The hello is the first line of the slot for lines: a rank
// that is at another operation finds this one's flag there.
#pragma once

#include "collectives/lines.h"

namespace te_graph::collectives {

constexpr int kTileBytes = 16 << 10;

// Tiles that a slot has room for.
constexpr int64_t tiles_of_slot(int64_t slot_bytes) {
    const int64_t tiles = (slot_bytes - kLineBytes) / (kTileBytes + static_cast<int64_t>(sizeof(uint64_t)));
    return tiles < 0 ? 0 : tiles;
}
// Where the tiles of a slot begin: at a line.
constexpr int64_t tile_data_offset(int64_t slot_bytes) {
    const int64_t flags = tiles_of_slot(slot_bytes) * static_cast<int64_t>(sizeof(uint64_t));
    return (flags + kLineBytes - 1) / kLineBytes * kLineBytes;
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
