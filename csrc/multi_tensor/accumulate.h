// Gradient accumulation over a table of tensors: the last node of every captured backward graph. No Torch here.
//
//   mode store: destination[i] = source[i]
//   mode add:   destination[i] = destination[i] + source[i], summed in fp32 (fp64 for fp64), rounded once
//   mode skip:  destination is not touched
//
// The table lives in device memory, so a captured launch serves any destination and any mode: the host changes entries
// between replays, ordered on the stream, and the graph is never edited.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace te_graph::multi_tensor {

enum class DType : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };
enum class Mode : uint8_t { kSkip, kStore, kAdd };

// One tensor. 32 bytes, so that a block fetches its entry with two 16-byte loads.
struct alignas(32) Entry {
    const void* source;  // [numel]
    void* destination;   // [numel]
    int64_t numel;
    DType source_dtype;
    DType destination_dtype;
    Mode mode;
    uint8_t reserved[5];
};
static_assert(sizeof(Entry) == 32);

// The part of one tensor that one block (or one CPU iteration) handles: elements
// [index * kChunkElements, min(numel, (index + 1) * kChunkElements)). Chunks start at each tensor's first element, so
// their alignment is the tensor's own.
struct Chunk {
    int32_t entry;
    int32_t index;
};

// 8192 elements: small enough that a transformer layer of hidden size 512 fills 132 multiprocessors, large enough that
// reading the entry is below 1 % of the bytes moved.
constexpr int64_t kChunkElements = 8192;

// A change of one entry, small enough that 128 of them travel as kernel arguments: nothing on the host has to outlive
// the launch.
struct EntryUpdate {
    void* destination;
    int32_t entry;
    Mode mode;
};

// True when `source` may be added into `destination`: equal dtypes, or fp16 / bf16 into fp32.
constexpr bool is_supported(DType source, DType destination) {
    return source == destination ||
           (destination == DType::kFloat32 && (source == DType::kFloat16 || source == DType::kBFloat16));
}

// Splits tensors of the given sizes into chunks, in order. Empty tensors get none.
inline std::vector<Chunk> make_chunks(const std::vector<int64_t>& numels) {
    std::vector<Chunk> chunks;
    for (size_t entry = 0; entry < numels.size(); ++entry) {
        const int64_t parts = (numels[entry] + kChunkElements - 1) / kChunkElements;
        for (int64_t index = 0; index < parts; ++index) {
            chunks.push_back({static_cast<int32_t>(entry), static_cast<int32_t>(index)});
        }
    }
    return chunks;
}

// CPU: the executable specification.
void accumulate_cpu(const Entry* table, const Chunk* chunks, int64_t num_chunks);
void update_entries_cpu(Entry* table, const EntryUpdate* updates, int64_t count);

#ifdef TE_GRAPH_CUDA
// table: [entries], chunks: [num_chunks], both in device memory. No allocation, no host sync.
cudaError_t launch_accumulate(const Entry* table, const Chunk* chunks, int64_t num_chunks, cudaStream_t stream);
// updates: [count] in host memory, of distinct entries; read before the call returns.
cudaError_t launch_update_entries(Entry* table, const EntryUpdate* updates, int64_t count, cudaStream_t stream);
#endif

}  // namespace te_graph::multi_tensor
