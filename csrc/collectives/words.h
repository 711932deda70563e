// Large reductions by words: nothing but data on the wire, and neither flag nor fence. An inbox is full of a word that
// no data has, so whoever finds another one has found data; who has taken it puts the empty word back, for the
// operation after the next (lines.h says why it is time then). For each block of a peer there is one line with a flag,
// in the slot for lines, so that a peer that is at another operation is seen before its data is taken.
//
// The empty word is a NaN of each format, twice for those of two bytes. Data that looks like it is sent as another
// NaN: sums are NaN all the same, and their bits do not depend on those of a NaN that went in.
#pragma once

#include "collectives/lines.h"

namespace te_graph::collectives {

constexpr uint32_t kEmptyWord = 0xFFFFFFFF;
constexpr uint64_t kEmpty = static_cast<uint64_t>(kEmptyWord) << 32 | kEmptyWord;
constexpr int kEmptyByte = 0xFF;
// A NaN of each format, too, and the largest word but the empty one, so that a minimum replaces that by it.
constexpr uint32_t kNanWord = kEmptyWord - 1;

#ifdef TE_GRAPH_CUDA
// Of all steps but kSend. count: lines of words in a piece. A slot for lines has room for a line of each block.
cudaError_t launch_words(const Peers& peers, const Job& job, cudaStream_t stream);
#endif

}  // namespace te_graph::collectives
