// Grid: x over 16-byte words of one tensor, grid-stride; y: the tensor.
// Bytes: each written once.
#include "graphs/callables/negative_zeros.h"

#include <algorithm>

namespace te_graph::graphs {
namespace {

constexpr int kMaxFills = 64, kThreads = 256, kMaxBlocks = 528;

struct FillBatch {
    NegativeZeros fills[kMaxFills];
};

__global__ void fill_negative_zeros_kernel(const __grid_constant__ FillBatch batch) {
    const NegativeZeros& fill = batch.fills[blockIdx.y];
    const uint4 zeros = make_uint4(fill.word, fill.word, fill.word, fill.word);
    auto* const out = static_cast<uint4*>(fill.data);
    const int64_t count = fill.bytes / static_cast<int64_t>(sizeof(uint4));
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
        out[i] = zeros;
    }
}

}  // namespace

cudaError_t launch_fill_negative_zeros(const NegativeZeros* fills, int64_t count, cudaStream_t stream) {
    for (int64_t first = 0; first < count; first += kMaxFills) {
        const int size = static_cast<int>(std::min<int64_t>(kMaxFills, count - first));
        FillBatch batch{};
        std::copy_n(fills + first, size, batch.fills);
        int64_t largest = 1;
        for (int i = 0; i < size; ++i) largest = std::max(largest, batch.fills[i].bytes / 16);
        const auto blocks = std::min<int64_t>(kMaxBlocks, (largest + kThreads - 1) / kThreads);
        fill_negative_zeros_kernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(size)), kThreads, 0,
                                     stream>>>(batch);
        if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace te_graph::graphs
