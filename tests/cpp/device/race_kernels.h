// Kernels of collectives with delayed blocks, some of which do not wait.
#pragma once

#include "collectives/protocols.h"

namespace te_graph::collectives {

enum class Waiting { kForData, kForNothing };

// A one-shot all-reduce of fp32, LL128 or Lamport.
cudaError_t launch_late(const Peers& peers, const LaunchArgs& args, Protocol protocol, Waiting waiting,
                        cudaStream_t stream);

// Copies after some time, and lets its successor start at once.
cudaError_t copy_late(char* to, const char* from, int64_t bytes, uint64_t ns, cudaStream_t stream);
// Copies the input to out, and does not wait for its predecessor.
cudaError_t launch_copy_without_wait(const LaunchArgs& args, cudaStream_t stream);

}  // namespace te_graph::collectives
