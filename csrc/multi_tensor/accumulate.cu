// destination (=|+=) source over a table of tensors, in one launch.
//
// Grid: one block of 256 threads per chunk of 8192 elements of one tensor. Each thread moves 8 elements at a time with
// 16-byte accesses; where an address is not 16-byte aligned the block moves single elements instead.
// Bytes per element: source read + destination written (+ destination read when adding): 6 for bf16 += bf16.
// Determinism: every element has one writer and one addition, so the bits depend on nothing but the operands.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "multi_tensor/accumulate.h"

namespace te_graph::multi_tensor {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kMaxUpdates = 128;  // 16 bytes each: 2 KB of the 4 KB that every driver passes as kernel arguments

__device__ float widen(float value) { return value; }
__device__ double widen(double value) { return value; }
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T, typename Wide>
__device__ T narrow(Wide value) {
    if constexpr (std::is_same_v<T, __half>) {
        return __float2half_rn(value);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __float2bfloat16_rn(value);
    } else {
        return value;
    }
}

template <typename T>
struct alignas(16) Vector {
    T values[kVector];
};

template <typename Source, typename Destination>
__device__ Destination combine(Source source, Destination destination, bool add) {
    if (add) return narrow<Destination>(widen(destination) + widen(source));
    if constexpr (std::is_same_v<Source, Destination>) {
        return source;
    } else {
        return narrow<Destination>(widen(source));
    }
}

template <typename Source, typename Destination>
__device__ void accumulate_chunk(const Source* __restrict__ source, Destination* __restrict__ destination, int count,
                                 bool add) {
    const bool aligned = (reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(destination)) % 16 == 0;
    const int vectors = aligned ? count / kVector : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
        const auto from = reinterpret_cast<const Vector<Source>*>(source)[i];
        auto* const to = reinterpret_cast<Vector<Destination>*>(destination) + i;
        Vector<Destination> result{};
        if (add) result = *to;
#pragma unroll
        for (int k = 0; k < kVector; ++k) result.values[k] = combine(from.values[k], result.values[k], add);
        *to = result;
    }
    for (int i = vectors * kVector + threadIdx.x; i < count; i += kThreads) {
        destination[i] = combine(source[i], add ? destination[i] : Destination{}, add);
    }
}

template <typename Source, typename Destination>
__device__ void accumulate_entry(const Entry& entry, int64_t begin, int count) {
    accumulate_chunk(static_cast<const Source*>(entry.source) + begin,
                     static_cast<Destination*>(entry.destination) + begin, count, entry.mode == Mode::kAdd);
}

__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(const Entry* __restrict__ table, const Chunk* __restrict__ chunks) {
    const Chunk chunk = chunks[blockIdx.x];
    const Entry entry = table[chunk.entry];
    if (entry.mode == Mode::kSkip) return;
    const int64_t begin = chunk.index * kChunkElements;
    const int count = static_cast<int>(min(entry.numel - begin, kChunkElements));

    // is_supported() was checked when the entry was made, so a narrow source with a wide destination means fp32.
    switch (entry.source_dtype) {
        case DType::kFloat32:
            return accumulate_entry<float, float>(entry, begin, count);
        case DType::kFloat64:
            return accumulate_entry<double, double>(entry, begin, count);
        case DType::kFloat16:
            if (entry.destination_dtype == DType::kFloat32) return accumulate_entry<__half, float>(entry, begin, count);
            return accumulate_entry<__half, __half>(entry, begin, count);
        case DType::kBFloat16:
            if (entry.destination_dtype == DType::kFloat32) {
                return accumulate_entry<__nv_bfloat16, float>(entry, begin, count);
            }
            return accumulate_entry<__nv_bfloat16, __nv_bfloat16>(entry, begin, count);
    }
}

struct UpdateBatch {
    EntryUpdate updates[kMaxUpdates];
};

// Grid: one block; thread i applies update i.
__global__ void update_entries_kernel(Entry* table, const __grid_constant__ UpdateBatch batch, int count) {
    const int i = threadIdx.x;
    if (i >= count) return;
    Entry& entry = table[batch.updates[i].entry];
    entry.destination = batch.updates[i].destination;
    entry.mode = batch.updates[i].mode;
}

}  // namespace

cudaError_t launch_accumulate(const Entry* table, const Chunk* chunks, int64_t num_chunks, cudaStream_t stream) {
    if (num_chunks == 0) return cudaSuccess;
    accumulate_kernel<<<static_cast<unsigned>(num_chunks), kThreads, 0, stream>>>(table, chunks);
    return cudaGetLastError();
}

cudaError_t launch_update_entries(Entry* table, const EntryUpdate* updates, int64_t count, cudaStream_t stream) {
    for (int64_t first = 0; first < count; first += kMaxUpdates) {
        const int size = static_cast<int>(std::min<int64_t>(kMaxUpdates, count - first));
        UpdateBatch batch{};
        std::copy_n(updates + first, size, batch.updates);
        update_entries_kernel<<<1, kMaxUpdates, 0, stream>>>(table, batch, size);
        if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace te_graph::multi_tensor
