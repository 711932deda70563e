// An operation as ops hand it to a group, and how messages speak of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "collectives/signal.h"

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

// Somebody who moves data between ranks.
class Transport {
public:
    virtual ~Transport() = default;
    // On the current stream. Errors that are known before anything runs are thrown. Tensors may have no elements.
    virtual void run(const Operation& operation) = 0;
    // Throws if the group was given up; `op` is whoever asks.
    virtual void check(const char* op) = 0;
    // Gives the group up: this rank's and, where they can be told, all ranks' operations end.
    virtual void abort() = 0;
    virtual void set_timeout(double seconds) = 0;
};

}  // namespace te_graph::collectives
