// The two words that operations are matched by, as plain functions: the flag that travels with data, and the state of a
// rank, in which the blocks of a kernel are counted in and out. No Torch.
#pragma once

#include <array>
#include <cstdint>

#include "common/host_device.h"

namespace te_graph::collectives {

constexpr int kMaxRanks = 8;
constexpr int kMaxBlocks = 128;

// Launch numbers, assigned round-robin: the primes between kMaxBlocks and 1024. With other numbers some interleavings
// of the blocks of two kernels would look like those of one, see read_state().
constexpr bool is_prime(int number) {
    for (int divisor = 2; divisor * divisor <= number; ++divisor) {
        if (number % divisor == 0) return false;
    }
    return true;
}
constexpr auto kLaunchIds = [] {
    std::array<int32_t, 141> ids{};
    int found = 0;
    for (int number = kMaxBlocks + 1; number < 1024; ++number) {
        if (is_prime(number)) ids.at(found++) = number;
    }
    return ids;
}();
constexpr int kMaxLaunchId = kLaunchIds.back();

enum class Op : uint8_t { kAllReduce, kReduceScatter, kAllGather };
enum class Reduction : uint8_t { kSum, kMax };

// The flag of an operation: its sequence number and its signature, so that a rank that waits can detect that a peer
// runs another operation, and which one.
//
//     63 ...... 37   36 35   34          33 ... 28   27 ........................... 0
//     sequence       op      reduction   dtype       hash of the extents, below 2^28 - 57
//
// A flag identifies the kind of an operation. Of its extents it shows only whether they differ.
constexpr int kSequenceBits = 27;
constexpr int kSignatureBits = 64 - kSequenceBits;

struct OperationKind {
    Op op;
    Reduction reduction;
    uint8_t dtype;  // any number below 64 that ranks agree on: c10::ScalarType

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
struct Signature {
    OperationKind kind;
    Extents extents;

    constexpr bool operator==(const Signature&) const = default;
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

TE_GRAPH_HOST_DEVICE constexpr uint64_t pack(const Signature& signature) {
    const OperationKind& kind = signature.kind;
    return static_cast<uint64_t>(kind.op) << 35 | static_cast<uint64_t>(kind.reduction) << 34 |
           static_cast<uint64_t>(kind.dtype & 63) << 28 | hash_of(signature.extents);
}
TE_GRAPH_HOST_DEVICE constexpr uint64_t flag_of(uint64_t sequence, uint64_t signature) {
    return sequence << kSignatureBits | signature;
}
TE_GRAPH_HOST_DEVICE constexpr uint64_t sequence_of(uint64_t flag) { return flag >> kSignatureBits; }
TE_GRAPH_HOST_DEVICE constexpr OperationKind kind_of(uint64_t flag) {
    return {static_cast<Op>(flag >> 35 & 3), static_cast<Reduction>(flag >> 34 & 1),
            static_cast<uint8_t>(flag >> 28 & 63)};
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

// The state of a rank. Each block of a kernel adds arrival() before anything else and departure() when it is done. All
// blocks of a kernel together add exactly one sequence number, so nothing is ever reset and the next kernel finds the
// next number, whatever its grid.
//
//     63 ...... 37   36 ..... 28   27 .... 19   18 ........ 0
//     sequence       departed      inside       launch, signed
//
// A departed block counts 2^9 / blocks, so that the last one carries into the sequence: the number of blocks is a
// power of two. In the lowest field each block but the last adds its launch's number n, and the last one -(blocks - 1)
// n. So a block that arrives while blocks of another kernel are inside finds a sum that its own launch cannot have
// produced: two kernels of a group at once on one GPU, the effect of two streams that are not ordered. The first block
// that meets another kernel detects it for all grids and interleavings (exhaustively tested).
constexpr int kLaunchBits = 19;
constexpr int kInsideBits = 9;
constexpr int kDepartedBits = 9;
constexpr int kSequenceShift = kLaunchBits + kInsideBits + kDepartedBits;
static_assert(kSequenceShift == kSignatureBits);
static_assert(2 * (kMaxBlocks - 1) * kMaxLaunchId < 1 << (kLaunchBits - 1) && kMaxBlocks < 1 << (kInsideBits - 1));

TE_GRAPH_HOST_DEVICE constexpr uint64_t arrival(int block, int blocks, int launch) {
    const int64_t part = block < blocks - 1 ? launch : -static_cast<int64_t>(blocks - 1) * launch;
    return (1ull << kLaunchBits) + static_cast<uint64_t>(part);
}
TE_GRAPH_HOST_DEVICE constexpr uint64_t departure(int blocks) {
    return (1ull << (kSequenceShift - kDepartedBits)) * ((1u << kDepartedBits) / blocks) - (1ull << kLaunchBits);
}

struct ArrivalResult {
    uint64_t sequence;
    bool is_exclusive;  // no block of another kernel is inside
};
// What a block learns from the `state` it found on arrival.
TE_GRAPH_HOST_DEVICE constexpr ArrivalResult read_state(uint64_t state, int blocks, int launch) {
    // In 32 bits where they suffice: sending waits for this.
    constexpr int kUpper = 32 - kLaunchBits;
    const int32_t sum = static_cast<int32_t>(static_cast<uint32_t>(state) << kUpper) >> kUpper;
    const uint64_t rest = state - static_cast<uint64_t>(int64_t{sum});
    const auto inside = static_cast<int32_t>(rest >> kLaunchBits & ((1u << kInsideBits) - 1));
    const auto share = static_cast<int32_t>(rest >> (kLaunchBits + kInsideBits) & ((1u << kDepartedBits) - 1));
    const int32_t arrived = inside + share * blocks / (1 << kDepartedBits);
    const bool is_own = sum == arrived * launch || sum == (arrived - blocks) * launch;
    return {rest >> kSequenceShift, arrived < blocks && is_own};
}

}  // namespace te_graph::collectives
