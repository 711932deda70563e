// out[i] = row_0[i] + row_1[i] + ... (or the largest), with the arithmetic of the kernels: in fp32, in row order,
// rounded once. For data moved by a process group. No Torch.
#pragma once

#include "collectives/peers.h"

namespace te_graph::collectives {

struct Rows {
    const void* rows;  // [ranks, columns]
    void* out;         // [columns]
    int64_t columns;
    int32_t ranks;
    Element element;  // no bytes
    Reduction reduction;
};

void reduce_rows_cpu(const Rows& rows);

#ifdef TE_GRAPH_CUDA
cudaError_t launch_reduce_rows(const Rows& rows, cudaStream_t stream);
#endif

}  // namespace te_graph::collectives
