// The Lamport protocol of large reductions, as in FlashInfer and TensorRT-LLM: nothing but data on the wire, neither
// flag nor fence. Receive buffers are filled with a sentinel word that data never has, so any other word is data; the
// receiver puts the sentinel back for the operation after the next (double buffering as in ll128.h). Each block sends
// its counterpart on each peer a handshake, one LL128 line with the flag, so that a peer that runs another operation is
// detected before its data is used.
//
// The sentinel is a NaN of each format, twice for those of two bytes. Data that equals it is sent as another NaN: sums
// are NaN all the same, and their bits do not depend on those of a NaN operand.
#pragma once

#include "collectives/ll128.h"

namespace te_graph::collectives {

constexpr uint32_t kSentinelWord = 0xFFFFFFFF;
constexpr uint64_t kSentinel = static_cast<uint64_t>(kSentinelWord) << 32 | kSentinelWord;
constexpr int kSentinelByte = 0xFF;
// Also a NaN of each format, and the largest word below the sentinel, so that a minimum replaces the sentinel by it.
constexpr uint32_t kNanWord = kSentinelWord - 1;

#ifdef TE_GRAPH_CUDA
// All algorithms but kAllGather. An LL128 slot has to have room for a line of each block.
cudaError_t launch_lamport(const Peers& peers, const LaunchArgs& args, cudaStream_t stream);
#endif

}  // namespace te_graph::collectives
