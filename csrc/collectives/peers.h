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
};

// Memory of a rank that its own kernels alone use.
struct Control {
    alignas(128) uint64_t state;  // signal.h
    alignas(128) uint64_t timeout_ns;
    int32_t is_claimed;  // somebody writes the record
    int32_t traps;       // give up by ending the context
    float failed;        // 0, or 1 once given up: the `found_inf` of captured optimizers
};

// The start of a rank's memory that peers write. The data of operations follows, see lines.h.
struct alignas(128) Mailbox {
    uint64_t abort;  // 0, or 1 + the rank that gave up
};

struct Peers {
    char* inbox[kMaxRanks];  // of each rank, as this GPU addresses it: two halves, for even and odd sequence numbers
    Mailbox* mailbox[kMaxRanks];
    Control* control;
    Record* record;
    int64_t slot_bytes;  // of an inbox half, for one sender: a multiple of a line
    int32_t rank;
    int32_t world;
};

// What elements are to a reduction; bytes are only moved.
enum class Element : uint8_t { kFloat32, kFloat16, kBFloat16, kBytes };

}  // namespace te_graph::collectives
