// Tables of tensors: what every multi-tensor op works on. No Torch here.
//
// An op gets its tensors either as entries in host memory, which travel to the device as kernel arguments (32 KB of
// them: one launch for up to kInlineTensors tensors), or as a table that lies on the device. A captured launch reads
// the latter again at each replay, so it serves whatever tensors the table names by then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

#include "common/dtype.h"

namespace te_graph::multi_tensor {

enum class Mode : uint8_t { kSkip, kStore, kAdd };

// One tensor, or a pair of equal size. 32 bytes, so that a block fetches its entry with two 16-byte loads.
struct alignas(32) TableEntry {
    const void* source;  // [numel]; read by accumulate and copy alone
    void* destination;   // [numel]; all that the other ops know of
    int64_t numel;
    DType source_dtype;
    DType destination_dtype;
    Mode mode;
    uint8_t reserved[5];
};
static_assert(sizeof(TableEntry) == 32);

// The part of one tensor that one block (or one CPU iteration) handles: elements
// [index * kChunkElements, min(numel, (index + 1) * kChunkElements)). Chunks start at each tensor's first element, so
// what is computed of a chunk depends on its tensor alone.
struct Chunk {
    int32_t entry;
    int32_t index;
};

// 8192 elements: small enough that a transformer layer of hidden size 512 fills 132 multiprocessors, large enough that
// reading the entry is below 1 % of the bytes moved.
constexpr int64_t kChunkElements = 8192;

// Threads of a block.
constexpr int kThreads = 256;

constexpr int64_t chunks_of(int64_t numel) { return (numel + kChunkElements - 1) / kChunkElements; }

// Splits tensors of the given sizes into chunks, in order. Empty tensors get none.
inline std::vector<Chunk> make_chunks(const std::vector<int64_t>& numels) {
    std::vector<Chunk> chunks;
    for (size_t entry = 0; entry < numels.size(); ++entry) {
        for (int64_t index = 0; index < chunks_of(numels[entry]); ++index) {
            chunks.push_back({static_cast<int32_t>(entry), static_cast<int32_t>(index)});
        }
    }
    return chunks;
}

// True when `source` may be added into `destination`: equal dtypes, or fp16 / bf16 into fp32. Stored may be any pair.
constexpr bool is_supported(DType source, DType destination) {
    return source == destination ||
           (destination == DType::kFloat32 && (source == DType::kFloat16 || source == DType::kBFloat16));
}

// The tensors of one call.
struct TensorTable {
    const TableEntry* entries;      // [count], in device memory if there are chunks, else in host memory
    int64_t count;                  // of host entries; not looked at for a table on the device
    const Chunk* chunks = nullptr;  // [num_chunks] in device memory; nullptr: one call's worth of host entries
    int64_t num_chunks = 0;
};

// CPU ops read entries where they lie and split them into chunks as they go.
template <typename Function>  // (entry, first element, end)
void for_each_chunk(const TensorTable& tensors, const Function& function) {
    if (tensors.chunks != nullptr) {
        for (int64_t i = 0; i < tensors.num_chunks; ++i) {
            const TableEntry& entry = tensors.entries[tensors.chunks[i].entry];
            const int64_t begin = tensors.chunks[i].index * kChunkElements;
            const int64_t rest = entry.numel - begin;
            function(entry, begin, begin + (rest < kChunkElements ? rest : kChunkElements));
        }
        return;
    }
    for (const TableEntry* entry = tensors.entries; entry != tensors.entries + tensors.count; ++entry) {
        for (int64_t begin = 0; begin < entry->numel; begin += kChunkElements) {
            const int64_t rest = entry->numel - begin;
            function(*entry, begin, begin + (rest < kChunkElements ? rest : kChunkElements));
        }
    }
}

}  // namespace te_graph::multi_tensor
