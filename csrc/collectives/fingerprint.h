// What ranks compare so that none takes the data of another operation: the fingerprint of an operation, and the flag,
// the word with it that travels with data. As plain functions. No Torch.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace te_graph::collectives {

enum class Op : uint8_t { kAllReduce, kReduceScatter, kAllGather };
enum class Reduction : uint8_t { kSum, kMax };

// The flag of an operation: its sequence number and its fingerprint, so that a rank that waits can detect that a peer
// runs another operation, and which one.
//
//     63 ...... 38   37            36 35   34          33 ... 28   27 ........................... 0
//     sequence       in backward   op      reduction   dtype       hash of the extents, below 2^28 - 57
//
// A flag identifies the kind of an operation. Of its extents it shows only whether they differ.
constexpr int kSequenceBits = 26;
constexpr int kFingerprintBits = 64 - kSequenceBits;

struct OperationKind {
    Op op;
    Reduction reduction;
    uint8_t dtype;             // any number below 64 that ranks agree on: c10::ScalarType
    bool in_backward = false;  // called inside a backward, in_backward.h

    constexpr bool operator==(const OperationKind&) const = default;
};

// Of a rank's whole input, even where a launch processes a part of it. All-reduces are one-dimensional.
struct Extents {
    int64_t numel;
    int64_t dim = 0;     // the one that is scattered or gathered, not negative
    int64_t before = 1;  // the product of the sizes before dim
    int64_t behind = 1;

    TE_GRAPH_HOST_DEVICE constexpr int64_t size() const { return numel / (before * behind); }
    constexpr bool operator==(const Extents&) const = default;
};

// What ranks compare before they exchange data.
struct Fingerprint {
    OperationKind kind;
    Extents extents;

    constexpr bool operator==(const Fingerprint&) const = default;
};

// The modulus is prime, so the hash differs where one part alone differs by less than it, or by a power of two. The
// factor is about 2^28 over the golden ratio, no quotient of small sizes, so that differences of two parts do not
// cancel.
constexpr uint64_t kHashModulus = (1ull << 28) - 57, kHashFactor = 0x9E3779B;
TE_GRAPH_HOST_DEVICE constexpr uint64_t add_to_hash(uint64_t hash, int64_t part) {
    return (hash * kHashFactor + static_cast<uint64_t>(part) % kHashModulus) % kHashModulus;
}
TE_GRAPH_HOST_DEVICE constexpr uint64_t hash_of(const Extents& extents) {
    uint64_t hash = add_to_hash(0, extents.dim);
    hash = add_to_hash(hash, extents.before);
    hash = add_to_hash(hash, extents.behind);
    return add_to_hash(hash, extents.numel);
}

TE_GRAPH_HOST_DEVICE constexpr uint64_t pack(const Fingerprint& fingerprint) {
    const OperationKind& kind = fingerprint.kind;
    return static_cast<uint64_t>(kind.in_backward) << 37 | static_cast<uint64_t>(kind.op) << 35 |
           static_cast<uint64_t>(kind.reduction) << 34 | static_cast<uint64_t>(kind.dtype & 63) << 28 |
           hash_of(fingerprint.extents);
}
TE_GRAPH_HOST_DEVICE constexpr uint64_t flag_of(uint64_t sequence, uint64_t fingerprint) {
    return sequence << kFingerprintBits | fingerprint;
}
TE_GRAPH_HOST_DEVICE constexpr uint64_t sequence_of(uint64_t flag) { return flag >> kFingerprintBits; }
TE_GRAPH_HOST_DEVICE constexpr OperationKind kind_of(uint64_t flag) {
    return {static_cast<Op>(flag >> 35 & 3), static_cast<Reduction>(flag >> 34 & 1),
            static_cast<uint8_t>(flag >> 28 & 63), (flag >> 37 & 1) != 0};
}
// Whether they can be the extents of the flag's operation. Memory that has not been written never fits.
TE_GRAPH_HOST_DEVICE constexpr bool fits(const Extents& extents, uint64_t flag) {
    return extents.numel > 0 && extents.before > 0 && extents.behind > 0 &&
           flag_of(sequence_of(flag), pack({kind_of(flag), extents})) == flag;
}
// Same sequence number, but another kind or other extents. 0 is memory that has not been written yet.
TE_GRAPH_HOST_DEVICE constexpr bool is_other_operation(uint64_t expected, uint64_t seen) {
    return seen != 0 && expected != seen && sequence_of(expected) == sequence_of(seen);
}

}  // namespace te_graph::collectives
