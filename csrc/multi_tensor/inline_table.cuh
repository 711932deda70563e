// The two ways in which kernels get their tensors (table.h), and the launches that hand them over.
#pragma once

#include <algorithm>

#include "common/element.cuh"
#include "common/resident_blocks.cuh"
#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

// One chunk as a kernel sees it.
struct ChunkView {
    const void* source;
    void* destination;
    int64_t begin;  // first element
    int entry;      // number within the launch
    int count;      // elements
    DType source_dtype;
    DType destination_dtype;
    Mode mode;
};

// Both tables are read in two steps, so that the first one can be taken long before the second: locate(number, ...) for
// a chunk, then chunk_view(what it returned).
struct DeviceTable {
    const TableEntry* entries;
    const Chunk* chunks;
    int64_t num_chunks;

    static constexpr bool kIsInline = false;
    using Location = Chunk;
    __device__ Location locate(int64_t number, const Location&) const { return chunks[number]; }

    __device__ ChunkView chunk_view(Location chunk) const {
        const TableEntry entry = entries[chunk.entry];
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

// Entries as kernel arguments: 16 bytes for one tensor, 24 for a pair. A block finds the tensor of its first chunk by a
// coarse index and a short search, all threads reading the same words, and those of the chunks behind it by going on.
template <int kEntries, bool kPairs>
struct InlineTable {
    static constexpr bool kIsInline = true;
    static constexpr int kBuckets = 256;
    void* destinations[kEntries];
    const void* sources[kPairs ? kEntries : 1];
    uint32_t first_chunks[kEntries];
    uint16_t last_elements[kEntries];  // number, within its chunk, of the tensor's last element
    uint8_t dtypes[kEntries];          // source + 4 * destination
    Mode modes[kEntries];
    uint16_t buckets[kBuckets + 1];  // entry that holds the first chunk of each 256th part of the chunks, then the last
    uint32_t num_chunks;
    int count;

    void clear() { num_chunks = count = 0; }
    bool has_room(const TableEntry& entry) const {
        return count < kEntries && num_chunks + chunks_of(entry.numel) <= INT32_MAX;
    }
    void add(const TableEntry& entry) {
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
    // After the last add().
    void make_index() {
        int entry = 0;
        for (int bucket = 0; bucket < kBuckets; ++bucket) {
            const auto chunk = static_cast<uint32_t>(uint64_t{num_chunks} * bucket / kBuckets);
            while (entry + 1 < count && first_chunks[entry + 1] <= chunk) ++entry;
            buckets[bucket] = static_cast<uint16_t>(entry);
        }
        buckets[kBuckets] = static_cast<uint16_t>(count - 1);
    }

    // The last entry that starts at or before `chunk`: empty tensors start where the next one does.
    __device__ int find(uint32_t chunk) const {
        // The bucket's first chunk, rounded down by make_index(), is not behind `chunk`.
        const auto bucket = static_cast<uint32_t>(uint64_t{chunk} * kBuckets / num_chunks);
        int low = buckets[bucket], high = buckets[bucket + 1];
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_chunks[middle] <= chunk) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }

    struct Location {
        uint32_t chunk, begin, end;  // number within the launch; the first and the end of its tensor's chunks
        int entry;
    };
    __device__ Location location_of(uint32_t chunk, int entry, uint32_t begin) const {
        return {chunk, begin, entry + 1 < count ? first_chunks[entry + 1] : num_chunks, entry};
    }
    // `last`: an earlier answer, often of the same tensor or the one before.
    __device__ Location locate(int64_t number, const Location& last) const {
        const auto chunk = static_cast<uint32_t>(number);
        if (last.begin <= chunk && chunk < last.end) return {chunk, last.begin, last.end, last.entry};
        int entry = 0;
        if (chunk == last.end && chunk != 0) {
            entry = last.entry + 1;
            while (entry + 1 < count && first_chunks[entry + 1] <= chunk) ++entry;
        } else {
            entry = find(chunk);
        }
        return location_of(chunk, entry, first_chunks[entry]);
    }

    __device__ ChunkView chunk_view(const Location& location) const {
        const auto [chunk, begin, end, entry] = location;
        return {kPairs ? sources[entry] : nullptr,
                destinations[entry],
                (chunk - begin) * kChunkElements,
                entry,
                chunk + 1 < end ? static_cast<int>(kChunkElements) : last_elements[entry] + 1,
                static_cast<DType>(dtypes[entry] & 3),
                static_cast<DType>(dtypes[entry] >> 2),
                modes[entry]};
    }
};

// 32764 bytes of arguments are allowed. The small tables spare short lists the copy of the large ones.
constexpr int kInlineTensors = 2000;
constexpr int kInlinePairs = 1328;
constexpr int kFewInlineTensors = 120;
static_assert(sizeof(InlineTable<kInlineTensors, false>) <= 32764 - 128);
static_assert(sizeof(InlineTable<kInlinePairs, true>) <= 32764 - 128);

// Which chunks a block takes: every n-th of a table on the device, n being the number of blocks, or a run of
// neighbours of an inline one, which spares the search.
enum class Direction { kForward, kBackward };

// Calls body(view) for the block's chunks, early blocks having the first chunks or, backwards, the last. Where a chunk
// lies is read while the one before it is worked on.
template <Direction kDirection, typename Table, typename Body>
__device__ void for_each_chunk_of_block(const Table& table, const Body& body) {
    constexpr bool kRuns = Table::kIsInline, kBackward = kDirection == Direction::kBackward;
    const int64_t count = table.num_chunks, run = kBackward ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int64_t step = kRuns ? 1 : gridDim.x;
    int64_t number = kRuns ? count * run / gridDim.x : blockIdx.x;
    const int64_t end = kRuns ? count * (run + 1) / gridDim.x : count;
    const auto at = [=](int64_t i) { return kBackward && !kRuns ? count - 1 - i : i; };
    if (number >= end) return;
    auto location = table.locate(at(number), {});
    ChunkView next = table.chunk_view(location);
    if (number + step < end) location = table.locate(at(number + step), location);
    for (; number < end; number += step) {
        const ChunkView view = next;
        if (number + step < end) next = table.chunk_view(location);
        if (number + 2 * step < end) location = table.locate(at(number + 2 * step), location);
        body(view);
    }
}

// Reads run fastest when there are no other blocks than these.
template <typename Kernel>
int64_t reading_blocks(Kernel kernel, int64_t chunks) {
    return resident_blocks(kernel, kThreads, chunks);
}

// Writes run fastest when the blocks at work are on neighbouring chunks. Blocks with many chunks drift apart; those
// with one have nothing to look up ahead.
constexpr int64_t kChunksPerWriter = 2;
template <typename Kernel>
int64_t writing_blocks(Kernel kernel, int64_t chunks) {
    return std::max(resident_blocks(kernel, kThreads, chunks), chunks / kChunksPerWriter);
}

template <typename Table, typename Launch>
cudaError_t launch_inline(const TensorTable& tensors, const Launch& launch) {
    Table table;
    int64_t next = 0;
    do {
        table.clear();
        const int64_t first = next;
        while (next < tensors.count && table.has_room(tensors.entries[next])) table.add(tensors.entries[next++]);
        table.make_index();
        launch(table, int64_t{table.num_chunks}, first, next == tensors.count);
        if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    } while (next < tensors.count);
    return cudaSuccess;
}

// Calls launch(table, number of chunks, number of the first entry, whether it is the last launch) until all is handed
// over.
template <bool kPairs, typename Launch>
cudaError_t launch_over(const TensorTable& tensors, const Launch& launch) {
    if (tensors.chunks != nullptr) {
        launch(DeviceTable{tensors.entries, tensors.chunks, tensors.num_chunks}, tensors.num_chunks, int64_t{0}, true);
        return cudaGetLastError();
    }
    if (tensors.count <= kFewInlineTensors)
        return launch_inline<InlineTable<kFewInlineTensors, kPairs>>(tensors, launch);
    return launch_inline<InlineTable<kPairs ? kInlinePairs : kInlineTensors, kPairs>>(tensors, launch);
}

// Calls body.operator()<n>(i) for vectors i, i + kThreads, ... i + (n - 1) kThreads of this thread, until all whole
// vectors of kCount among `count` elements are done; returns the number of elements done. Vectors of a batch are
// loaded before the first one is stored, so that enough reads are under way.
template <int kCount, typename Body>
__device__ int for_each_vector(int count, const Body& body) {
    constexpr int kBatch = 4;
    const int vectors = count / kCount;
    int i = threadIdx.x;
    for (; i + (kBatch - 1) * kThreads < vectors; i += kBatch * kThreads) body.template operator()<kBatch>(i);
    for (; i < vectors; i += kThreads) body.template operator()<1>(i);
    return vectors * kCount;
}

}  // namespace te_graph::multi_tensor
