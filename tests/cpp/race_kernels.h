// Kernels of collectives whose blocks come late, and of which some do not wait.
#pragma once

#include "collectives/tuning.h"

namespace te_graph::collectives {

enum class Waiting { kForData, kForNothing };

// A sum of fp32 in one step, by lines or words.
cudaError_t launch_late(const Peers& peers, const Job& job, Way way, Waiting waiting, cudaStream_t stream);

// A reduce-scatter of fp32 by words, whose blocks take lines before they have heard their namesakes.
cudaError_t launch_deaf(const Peers& peers, const Job& job, cudaStream_t stream);

// Copies after some time, and lets its successor start at once.
cudaError_t copy_late(char* to, const char* from, int64_t bytes, uint64_t ns, cudaStream_t stream);
// Copies the input to out, and does not wait for its predecessor.
cudaError_t launch_hasty_copy(const Job& job, cudaStream_t stream);

}  // namespace te_graph::collectives
