// Grid: blocks of 256 threads, each taking every n-th chunk from the last one on: what the norm read last is still in
// the cache. Threads access 16 bytes at a time; where an address is not a multiple of 16, single elements.
// Bytes per element: one read and one write; zero: one write; factor 1: none.
// Determinism: every element has one writer and one product.
#include "multi_tensor/factor.h"
#include "multi_tensor/inline_table.cuh"
#include "multi_tensor/rescale.h"

namespace te_graph::multi_tensor {
namespace {

// Blocks that find nothing to clip cost, too: about a microsecond for each that is resident.
constexpr int kClipWaves = 12;

template <typename T>
__device__ void rescale_chunk(T* __restrict__ elements, int count, Wide<T> factor, bool& is_infinite) {
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
    rescale_kernel(const __grid_constant__ Table table, const Rescaling rescaling) {
    if (is_refused(rescaling)) {
        // Every block decides alike: the norm does not change, and found_inf only from 0 to 1 because of it.
        if (threadIdx.x == 0) *rescaling.found_inf = 1;
        return;
    }
    const double factor = factor_of(rescaling);
    if (factor == 1 && (rescaling.is_clip || rescaling.found_inf == nullptr)) return;
    bool is_infinite = false;
    for_each_piece<Order::kBackwards>(table, [&](const Piece& piece) {
        with_type(piece.destination_dtype, [&]<typename T>() {
            rescale_chunk(static_cast<T*>(piece.destination) + piece.begin, piece.count, static_cast<Wide<T>>(factor),
                          is_infinite);
        });
    });
    if (is_infinite && !rescaling.is_clip && rescaling.found_inf != nullptr) *rescaling.found_inf = 1;
}

__device__ void zero_bytes(char* memory, int64_t bytes) {
    const int64_t vectors = is_aligned(memory) ? bytes / 16 : 0;
    for (int64_t i = threadIdx.x; i < vectors; i += kThreads) reinterpret_cast<uint4*>(memory)[i] = uint4{};
    for (int64_t i = vectors * 16 + threadIdx.x; i < bytes; i += kThreads) memory[i] = 0;
}

template <typename Table>
__global__ void __launch_bounds__(kThreads) zero_kernel(const __grid_constant__ Table table) {
    for_each_piece<Order::kForwards>(table, [&](const Piece& piece) {
        with_type(piece.destination_dtype, [&]<typename T>() {
            zero_bytes(reinterpret_cast<char*>(static_cast<T*>(piece.destination) + piece.begin),
                       piece.count * static_cast<int64_t>(sizeof(T)));
        });
    });
}

}  // namespace

cudaError_t launch_rescale(const Work& work, const Rescaling& rescaling, cudaStream_t stream) {
    return launch_over<false>(work, [&](const auto& table, int64_t chunks, int64_t, bool) {
        const auto kernel = rescale_kernel<std::decay_t<decltype(table)>>;
        // found_inf is set even where there is nothing to clip.
        chunks = std::max<int64_t>(1, chunks);
        int64_t blocks = writing_blocks(kernel, chunks);
        if (rescaling.is_clip) blocks = std::min(blocks, kClipWaves * resident_blocks(kernel, chunks));
        kernel<<<blocks, kThreads, 0, stream>>>(table, rescaling);
    });
}

cudaError_t launch_zero(const Work& work, cudaStream_t stream) {
    return launch_over<false>(work, [&](const auto& table, int64_t chunks, int64_t, bool) {
        const auto kernel = zero_kernel<std::decay_t<decltype(table)>>;
        if (chunks > 0) kernel<<<writing_blocks(kernel, chunks), kThreads, 0, stream>>>(table);
    });
}

}  // namespace te_graph::multi_tensor
