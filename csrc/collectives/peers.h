// Arguments of the kernels of a group, and the memory that they share with peers and the host. No Torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/fingerprint.h"
#include "collectives/rank_state.h"

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace te_graph::collectives {

constexpr int kMaxRanks = 8;

// Why a group was aborted.
enum class Failure : int32_t {
    kNone,
    kTimeout,            // a peer's data did not arrive in time
    kMismatch,           // a peer runs another operation
    kConcurrentKernels,  // two kernels of the group at once on one GPU
    kAbortedByPeer,      // a peer aborted first
    kAborted,            // abort() was called
};

// Pinned host memory that kernels write when they abort, and that the host reads without synchronizing.
struct FailureRecord {
    int32_t is_set;  // written last
    Failure failure;
    int32_t peer;
    int32_t reserved;
    uint64_t expected;  // flag
    uint64_t seen;      // flag
    Extents extents;    // of the expected operation
};

// Device memory of a rank that only its own kernels and its host access.
struct Control {
    alignas(128) uint64_t state;  // rank_state.h
    alignas(128) uint64_t timeout_ns;
    int32_t is_claimed;  // the record is being written
    int32_t traps;       // abort by ending the context
    float failed;        // 0, or 1 once aborted: the `found_inf` of captured optimizers
    FailureRecord* record;
};

// The start of a rank's receive buffer, written by peers that abort. The slots of operations follow: for LL128 lines,
// for data (Lamport and simple) and for flags (simple). All are multiples of a line.
struct alignas(128) SignalPad {
    uint64_t abort;  // 0, or 1 + the rank that aborted
    // By sender: extents of the operation in which it aborted, for messages. 0 before.
    alignas(128) Extents extents[kMaxRanks];
};
static_assert(sizeof(SignalPad) % 128 == 0);

// Kernel arguments are loaded 64 bytes at a time, so those that the smallest operations need come first: LaunchArgs,
// these addresses, and last what only an abort reads.
struct Peers {
    Control* control;
    int32_t rank;
    int32_t world;
    // Of one sender in half a receive buffer; multiples of a line.
    int64_t ll128_slot_bytes;
    int64_t data_slot_bytes;  // Lamport and simple
    int64_t flag_slot_bytes;  // simple
    // Of each rank, in this GPU's address space.
    char* receive_buffer[kMaxRanks];
    char* pool[kMaxRanks];  // a tensor at offset o of rank p's pool is at pool[p] + o
    Extents extents;        // of the operation that is launched

    TE_GRAPH_HOST_DEVICE SignalPad* signal_pad(int p) const { return reinterpret_cast<SignalPad*>(receive_buffer[p]); }
    // Slots for even sequence numbers, then for odd ones.
    TE_GRAPH_HOST_DEVICE char* ll128_slots(int p) const { return receive_buffer[p] + sizeof(SignalPad); }
    TE_GRAPH_HOST_DEVICE char* data_slots(int p) const { return ll128_slots(p) + 2 * (world - 1) * ll128_slot_bytes; }
    TE_GRAPH_HOST_DEVICE char* flag_slots(int p) const { return data_slots(p) + 2 * (world - 1) * data_slot_bytes; }
};

// Element types of reductions; bytes are only moved.
enum class Element : uint8_t { kFloat32, kFloat16, kBFloat16, kBytes };

// A tensor in pieces, one per rank: piece p begins at p * stride and ends after `piece` bytes or with the tensor.
// stride 0: each piece is the whole tensor.
template <typename Byte>
struct Pieces {
    Byte* data;
    int64_t bytes;
    int64_t stride;
    int64_t piece;

    TE_GRAPH_HOST_DEVICE Byte* begin(int p) const { return data + p * stride; }
    TE_GRAPH_HOST_DEVICE int64_t size(int p) const {
        const int64_t left = bytes - p * stride;
        return left < 0 ? 0 : left < piece ? left : piece;
    }
};

//     kOneShot        all-reduce: each rank sends its tensor to all and reduces all of them
//     kTwoShot        all-reduce: a reduce-scatter, then each rank sends its sum to all
//     kReduceScatter  each rank sends piece p to rank p and reduces the pieces it receives
//     kAllGather      each rank sends its tensor to all
enum class Algorithm : uint8_t { kOneShot, kTwoShot, kReduceScatter, kAllGather };

struct LaunchArgs {
    Pieces<const char> input;  // kOneShot, kAllGather: one piece
    Pieces<char> out;          // kOneShot, kReduceScatter: one piece
    uint64_t fingerprint;
    int64_t count;        // lines or chunks of a piece
    int64_t pool_offset;  // of out.data in this rank's memory pool; -1: not in the pool
    int32_t launch;       // launch number, one of kLaunchIds
    int32_t blocks;       // a power of two
    Algorithm algorithm;
    Element element;
    Reduction reduction;
    bool starts_early;  // launch_state.cuh
    // Of sums: by what they are multiplied before they are rounded; the product of both.
    float scale = 1.0f;
    const float* scale_tensor = nullptr;  // [1], or null
};

}  // namespace te_graph::collectives
