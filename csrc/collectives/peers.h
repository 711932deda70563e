// What kernels of a group know of it, and their launchers. No Torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/signal.h"

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace te_graph::collectives {

// Why a group was given up.
enum class Failure : int32_t {
    kNone,
    kTimeout,     // a peer's data did not come in time
    kMismatch,    // a peer is at another operation
    kTwoKernels,  // two kernels of the group at once on one GPU
    kToldByPeer,  // a peer gave up
    kAborted,     // abort() was called
};

// Pinned host memory that kernels write when they give up, and hosts look at without the GPU.
struct Record {
    int32_t is_set;  // written last
    Failure failure;
    int32_t peer;
    int32_t reserved;
    uint64_t expected;  // flag
    uint64_t seen;      // flag
    Extents extents;    // of what is expected
};

// Memory of a rank that its own kernels alone use.
struct Control {
    alignas(128) uint64_t state;  // signal.h
    alignas(128) uint64_t timeout_ns;
    int32_t is_claimed;  // somebody writes the record
    int32_t traps;       // give up by ending the context
    float failed;        // 0, or 1 once given up: the `found_inf` of captured optimizers
    Record* record;
    alignas(128) uint32_t taken[kMaxLaunchId + 1];  // course.h, by a launch's number; 0 between operations
};

// The start of a rank's memory that peers write: the inbox. What comes with operations follows: slots for lines, then
// for data and for flags of tiles, see lines.h. Multiples of a line.
struct alignas(128) Mailbox {
    uint64_t abort;  // 0, or 1 + the rank that gave up
    // By sender: of the operation in which it gave up, for messages. 0 before.
    alignas(128) Extents extents[kMaxRanks];
};
static_assert(sizeof(Mailbox) % 128 == 0);

// Each 64 bytes of a kernel's arguments are waited for, so what the smallest operations need comes first: a Job, these
// addresses, and at the end what is read by who gives up.
struct Peers {
    Control* control;
    int32_t rank;
    int32_t world;
    // Of an inbox half, for one sender; multiples of a line.
    int64_t line_slot_bytes;
    int64_t data_slot_bytes;  // of words and tiles
    int64_t flag_slot_bytes;  // of tiles
    // Of each rank, as this GPU addresses it.
    char* inbox[kMaxRanks];
    char* pool[kMaxRanks];  // where a tensor at offset o of rank p's pool is: pool[p] + o
    Extents extents;        // of the operation that is launched

    TE_GRAPH_ANYWHERE Mailbox* mailbox(int p) const { return reinterpret_cast<Mailbox*>(inbox[p]); }
    // A half for even and one for odd sequence numbers each.
    TE_GRAPH_ANYWHERE char* lines(int p) const { return inbox[p] + sizeof(Mailbox); }
    TE_GRAPH_ANYWHERE char* data(int p) const { return lines(p) + 2 * (world - 1) * line_slot_bytes; }
    TE_GRAPH_ANYWHERE char* flags(int p) const { return data(p) + 2 * (world - 1) * data_slot_bytes; }
};

// What elements are to a reduction; bytes are only moved.
enum class Element : uint8_t { kFloat32, kFloat16, kBFloat16, kBytes };

// Memory in pieces, one per rank: piece p begins at p * stride and ends after `piece` bytes or with the whole.
// stride 0: each piece is the whole.
template <typename Byte>
struct Pieces {
    Byte* data;
    int64_t bytes;
    int64_t stride;
    int64_t piece;

    TE_GRAPH_ANYWHERE Byte* begin(int p) const { return data + p * stride; }
    TE_GRAPH_ANYWHERE int64_t size(int p) const {
        const int64_t left = bytes - p * stride;
        return left < 0 ? 0 : left < piece ? left : piece;
    }
};

// What comes to pass.
//
//     kReduce      all-reduce in one step: each rank sends all to all and sums what it gets
//     kScatter     reduce-scatter: each rank sends piece p to rank p and sums what it gets
//     kReduceSend  all-reduce in two steps: the same, and each rank sends its sum to all
//     kSend        all-gather
enum class Steps : uint8_t { kReduce, kScatter, kReduceSend, kSend };

struct Job {
    Pieces<const char> input;  // kReduce, kSend: one piece
    Pieces<char> out;          // kReduce, kScatter: one piece
    uint64_t signature;
    int64_t count;        // lines or tiles in a piece
    int64_t pool_offset;  // of out.data in this rank's pool; -1: it lies elsewhere
    int32_t launch;       // of kLaunchIds
    int32_t blocks;       // a power of two
    Steps steps;
    Element element;
    Reduction reduction;
    bool starts_early;  // early_launch.cuh
};

}  // namespace te_graph::collectives
