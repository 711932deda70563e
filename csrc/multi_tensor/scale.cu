// Grid: blocks of 256 threads, each taking every n-th chunk from the last one on: what the norm read last is still in
// the cache. Threads access 16 bytes at a time; where an address is not a multiple of 16, single elements.
// Bytes per element: one read and one write; zero: one write; factor 1: none.
// Determinism: every element has one writer and one product.
#include "multi_tensor/inline_table.cuh"
#include "multi_tensor/scale.h"
#include "multi_tensor/scale_factor.h"

namespace te_graph::multi_tensor {
namespace {

// Blocks that find nothing to clip cost, too: about a microsecond for each that is resident.
constexpr int kClipWaves = 12;

template <typename T>
__device__ void scale_chunk(T* __restrict__ elements, int count, Wide<T> factor, bool& is_infinite) {
    const auto product = [&](T element) {
        const T result = narrow<T>(widen(element) * factor);
        is_infinite |= !is_finite(widen(result));
        return result;
    };
    auto* const vectors = reinterpret_cast<Vector<T>*>(elements);
    int done = 0;
    if (is_aligned(elements)) {
        done = for_each_vector<kVector<T>>(count, [&]<int kBatch>(int first) {
            Vector<T> batch[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) batch[b] = vectors[first + b * kThreads];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
#pragma unroll
                for (int k = 0; k < kVector<T>; ++k) batch[b].values[k] = product(batch[b].values[k]);
                vectors[first + b * kThreads] = batch[b];
            }
        });
    }
    for (int i = done + threadIdx.x; i < count; i += kThreads) elements[i] = product(elements[i]);
}

template <typename Table>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_scale_kernel(const __grid_constant__ Table table, const Scaling scaling) {
    if (is_refused(scaling)) {
        // Every block decides alike: the norm does not change, and found_inf only from 0 to 1 because of it.
        if (threadIdx.x == 0) *scaling.found_inf = 1;
        return;
    }
    const double factor = factor_of(scaling);
    if (factor == 1 && (scaling.is_clip || scaling.found_inf == nullptr)) return;
    bool is_infinite = false;
    for_each_chunk_of_block<Direction::kBackward>(table, [&](const ChunkView& view) {
        with_type(view.destination_dtype, [&]<typename T>() {
            scale_chunk(static_cast<T*>(view.destination) + view.begin, view.count, static_cast<Wide<T>>(factor),
                        is_infinite);
        });
    });
    if (is_infinite && !scaling.is_clip && scaling.found_inf != nullptr) *scaling.found_inf = 1;
}

__device__ void zero_bytes(char* memory, int64_t bytes) {
    const int64_t vectors = is_aligned(memory) ? bytes / 16 : 0;
    for (int64_t i = threadIdx.x; i < vectors; i += kThreads) reinterpret_cast<uint4*>(memory)[i] = uint4{};
    for (int64_t i = vectors * 16 + threadIdx.x; i < bytes; i += kThreads) memory[i] = 0;
}

template <typename Table>
__global__ void __launch_bounds__(kThreads) multi_tensor_zero_kernel(const __grid_constant__ Table table) {
    for_each_chunk_of_block<Direction::kForward>(table, [&](const ChunkView& view) {
        with_type(view.destination_dtype, [&]<typename T>() {
            zero_bytes(reinterpret_cast<char*>(static_cast<T*>(view.destination) + view.begin),
                       view.count * static_cast<int64_t>(sizeof(T)));
        });
    });
}

}  // namespace

cudaError_t launch_scale(const TensorTable& tensors, const Scaling& scaling, cudaStream_t stream) {
    return launch_over<false>(tensors, [&](const auto& table, int64_t chunks, int64_t, bool) {
        const auto kernel = multi_tensor_scale_kernel<std::decay_t<decltype(table)>>;
        // found_inf is set even where there is nothing to clip.
        chunks = std::max<int64_t>(1, chunks);
        int64_t blocks = writing_blocks(kernel, chunks);
        if (scaling.is_clip) blocks = std::min(blocks, kClipWaves * resident_blocks(kernel, kThreads, chunks));
        kernel<<<blocks, kThreads, 0, stream>>>(table, scaling);
    });
}

cudaError_t launch_zero(const TensorTable& tensors, cudaStream_t stream) {
    return launch_over<false>(tensors, [&](const auto& table, int64_t chunks, int64_t, bool) {
        const auto kernel = multi_tensor_zero_kernel<std::decay_t<decltype(table)>>;
        if (chunks > 0) kernel<<<writing_blocks(kernel, chunks), kThreads, 0, stream>>>(table);
    });
}

}  // namespace te_graph::multi_tensor
