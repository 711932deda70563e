// Memory that a product adds to as if it stored. No Torch here.
//
//   x + -0 = x  for every x, -0 among them, where x + 0 makes 0 of -0.
#pragma once

#include <cstdint>

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace te_graph::graphs {

struct NegativeZeros {
    void* data;     // at a multiple of 16
    int64_t bytes;  // a multiple of 16
    uint32_t word;  // one -0 of fp32, or two of fp16 or bf16
};

constexpr uint32_t negative_zero_word(int64_t element_size) { return element_size == 4 ? 0x80000000u : 0x80008000u; }

// All `count` become negative zeros.
void fill_negative_zeros_cpu(const NegativeZeros* fills, int64_t count);

#ifdef TE_GRAPH_CUDA
// fills: [count] in host memory, read before the call returns. No allocation, no host sync; one launch for up to 64.
cudaError_t launch_fill_negative_zeros(const NegativeZeros* fills, int64_t count, cudaStream_t stream);
#endif

}  // namespace te_graph::graphs
