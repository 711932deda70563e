// An operation of a group, its description in messages, and the interface of transports.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "collectives/signature.h"

namespace te_graph::collectives {

// All tensors are contiguous, of one dtype and on the group's device.
struct Operation {
    const char* name;  // of the op, for messages
    Op op;
    Reduction reduction;
    at::Tensor input;  // all_reduce: [n]; reduce_scatter: [world, n]; all_gather: [n]
    at::Tensor out;    // all_reduce: [n], maybe `input`; reduce_scatter: [n]; all_gather: [world, n]
    Extents extents;

    Signature signature() const { return {{op, reduction, static_cast<uint8_t>(input.scalar_type())}, extents}; }
};

// "all_reduce (sum) of 1024 BFloat16", "all_gather of 24 Float along dim 1 of size 4 (2 before, 3 behind)"
std::string describe(const Signature& signature);
// "all_reduce (sum) of BFloat16"
std::string describe(const OperationKind& kind);

// Moves data between ranks.
class Transport {
public:
    virtual ~Transport() = default;
    // On the current stream. Errors that are known before anything runs are thrown. Tensors may have no elements.
    virtual void run(const Operation& operation) = 0;
    // Throws if the group was aborted. `op`: the caller, for the message.
    virtual void check(const char* op) = 0;
    // Aborts the group: operations end on this rank and, where they can be notified, on all ranks.
    virtual void abort() = 0;
    virtual void set_timeout(double seconds) = 0;
};

}  // namespace te_graph::collectives
