// The two ways in which kernels get their tensors (table.h), and the launches that hand them over.
#pragma once

#include <algorithm>

#include "multi_tensor/element.cuh"
#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

// One chunk as a kernel sees it.
struct Piece {
    const void* source;
    void* destination;
    int64_t begin;  // first element
    int entry;      // number within the launch
    int count;      // elements
    DType source_dtype;
    DType destination_dtype;
    Mode mode;
};

struct DeviceTable {
    const Entry* entries;
    const Chunk* chunks;
    int64_t num_chunks;

    __device__ Piece piece(int64_t number) const {
        const Chunk chunk = chunks[number];
        const Entry entry = entries[chunk.entry];
        const int64_t begin = chunk.index * kChunkElements;
        return {entry.source,
                entry.destination,
                begin,
                chunk.entry,
                static_cast<int>(min(entry.numel - begin, kChunkElements)),
                entry.source_dtype,
                entry.destination_dtype,
                entry.mode};
    }
};

// Entries as kernel arguments: 16 bytes for one tensor, 24 for a pair. A block finds the tensor of its chunk by a search
// of 32 probes at a time.
template <int kEntries, bool kPairs>
struct InlineTable {
    static constexpr int kCapacity = kEntries;
    void* destinations[kEntries];
    const void* sources[kPairs ? kEntries : 1];
    uint32_t first_chunks[kEntries];
    uint16_t last_elements[kEntries];  // number, within its chunk, of the tensor's last element
    uint8_t dtypes[kEntries];          // source + 4 * destination
    Mode modes[kEntries];
    uint32_t num_chunks;
    int count;

    void clear() { num_chunks = count = 0; }
    bool has_room(const Entry& entry) const {
        return count < kEntries && num_chunks + chunks_of(entry.numel) <= INT32_MAX;
    }
    void add(const Entry& entry) {
        destinations[count] = entry.destination;
        if constexpr (kPairs) sources[count] = entry.source;
        first_chunks[count] = num_chunks;
        last_elements[count] = static_cast<uint16_t>((entry.numel + kChunkElements - 1) % kChunkElements);
        dtypes[count] =
            static_cast<uint8_t>(static_cast<int>(entry.source_dtype) | static_cast<int>(entry.destination_dtype) << 2);
        modes[count] = entry.mode;
        num_chunks += static_cast<uint32_t>(chunks_of(entry.numel));
        ++count;
    }

    // The last tensor that starts at or before chunk `number`: that is the one, as empty tensors start where the next
    // one does.
    __device__ int find(uint32_t number) const {
        const int lane = threadIdx.x % 32;
        int low = 0, size = count;
        while (size > 1) {
            const int step = (size + 31) / 32;
            const int offset = lane * step;
            const unsigned starts_before =
                __ballot_sync(0xFFFFFFFFu, offset < size && first_chunks[low + min(offset, size - 1)] <= number);
            const int last = (31 - __clz(starts_before)) * step;
            low += last;
            size = min(step, size - last);
        }
        return low;
    }

    __device__ Piece piece(int64_t number) const {
        const auto chunk = static_cast<uint32_t>(number);
        const int entry = find(chunk);
        const uint32_t end = entry + 1 < count ? first_chunks[entry + 1] : num_chunks;
        return {kPairs ? sources[entry] : nullptr,
                destinations[entry],
                (chunk - first_chunks[entry]) * kChunkElements,
                entry,
                chunk + 1 < end ? static_cast<int>(kChunkElements) : last_elements[entry] + 1,
                static_cast<DType>(dtypes[entry] & 3),
                static_cast<DType>(dtypes[entry] >> 2),
                modes[entry]};
    }
};

// 32764 bytes of arguments are allowed. The small tables spare short lists the copy of the large ones.
constexpr int kInlineTensors = 2000;
constexpr int kInlinePairs = 1344;
constexpr int kFewInlineTensors = 120;
static_assert(sizeof(InlineTable<kInlineTensors, false>) <= 32764 - 256);
static_assert(sizeof(InlineTable<kInlinePairs, true>) <= 32764 - 256);

// Blocks of kThreads for `chunks` chunks: all multiprocessors several times over, each block taking every n-th chunk.
inline unsigned blocks_for(int64_t chunks, int blocks_per_multiprocessor) {
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return static_cast<unsigned>(std::min<int64_t>(chunks, int64_t{multiprocessors} * blocks_per_multiprocessor));
}

template <typename Table, typename Launch>
cudaError_t launch_inline(const Work& work, const Launch& launch) {
    Table table;
    int64_t next = 0;
    do {
        table.clear();
        const int64_t first = next;
        while (next < work.count && table.has_room(work.entries[next])) table.add(work.entries[next++]);
        launch(table, int64_t{table.num_chunks}, first, next == work.count);
        if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    } while (next < work.count);
    return cudaSuccess;
}

// Calls launch(table, number of chunks, number of the first entry, whether it is the last launch) until all is handed over.
template <bool kPairs, typename Launch>
cudaError_t launch_over(const Work& work, const Launch& launch) {
    if (work.chunks != nullptr) {
        launch(DeviceTable{work.entries, work.chunks, work.num_chunks}, work.num_chunks, int64_t{0}, true);
        return cudaGetLastError();
    }
    if (work.count <= kFewInlineTensors) return launch_inline<InlineTable<kFewInlineTensors, kPairs>>(work, launch);
    return launch_inline<InlineTable<kPairs ? kInlinePairs : kInlineTensors, kPairs>>(work, launch);
}

}  // namespace te_graph::multi_tensor
