// Bytes per element: one-step reduce: read twice, received world - 1 times, emptied as often, written once.
#include "collectives/words.h"

#include "collectives/line_kernels.cuh"
#include "collectives/word_wire.cuh"

namespace te_graph::collectives {

cudaError_t launch_words(const Peers& peers, const Job& job, cudaStream_t stream) {
    return launch_reduction<WordWire>(peers, job, stream);
}

}  // namespace te_graph::collectives
