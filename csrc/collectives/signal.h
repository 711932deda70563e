// The two words that collectives agree by, as plain functions: the state of a rank, which all blocks of a kernel count
// themselves in and out of, and the flag that travels with data. No Torch.
#pragma once

#include <array>
#include <cstdint>

#ifdef __CUDACC__
#define TE_GRAPH_ANYWHERE __host__ __device__
#else
#define TE_GRAPH_ANYWHERE
#endif

namespace te_graph::collectives {

constexpr int kMaxRanks = 8;
constexpr int kMaxBlocks = 128;

// Numbers that launches bear in turn: the primes between kMaxBlocks and 1024. With others some orders of the blocks of
// two kernels would look like those of one, see read_state().
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

// The flag of an operation: its sequence number and its signature, so that whoever waits sees that a peer is at another
// operation, and at which one.
//
//     63 ...... 37   36 35   34          33 ... 28   27 ........................... 0
//     sequence       op      reduction   dtype       hash of the extents, below 2^28 - 57
//
// A flag tells the kind of an operation. Of its extents it tells only whether they are others.
constexpr int kSequenceBits = 27;
constexpr int kSignatureBits = 64 - kSequenceBits;

struct OperationKind {
    Op op;
    Reduction reduction;
    uint8_t dtype;  // any number below 64 that ranks agree on: c10::ScalarType

    constexpr bool operator==(const OperationKind&) const = default;
};

// Of a rank's whole input, whatever part of it a launch does. An all-reduce takes elements for those of one dimension.
struct Extents {
    int64_t numel;
    int64_t dim = 0;     // from 0 on: that is divided, or joined
    int64_t before = 1;  // the product of the sizes before dim
    int64_t behind = 1;

    TE_GRAPH_ANYWHERE constexpr int64_t size() const { return numel / (before * behind); }
    constexpr bool operator==(const Extents&) const = default;
};

// What ranks compare.
struct Signature {
    OperationKind kind;
    Extents extents;

    constexpr bool operator==(const Signature&) const = default;
};

// The modulus is prime, so where one part alone differs by less than it, or by a power of two, the hash differs. The
// factor is about 2^28 over the golden ratio: no quotient of small sizes, so that those of two parts do not make up for
// each other.
constexpr uint64_t kHashModulus = (1ull << 28) - 57, kHashFactor = 0x9E3779B;
TE_GRAPH_ANYWHERE constexpr uint64_t add_to_hash(uint64_t hash, int64_t part) {
    return (hash * kHashFactor + static_cast<uint64_t>(part) % kHashModulus) % kHashModulus;
}
TE_GRAPH_ANYWHERE constexpr uint64_t hash_of(const Extents& extents) {
    uint64_t hash = add_to_hash(0, extents.dim);
    hash = add_to_hash(hash, extents.before);
    hash = add_to_hash(hash, extents.behind);
    return add_to_hash(hash, extents.numel);
}

TE_GRAPH_ANYWHERE constexpr uint64_t pack(const Signature& signature) {
    const OperationKind& kind = signature.kind;
    return static_cast<uint64_t>(kind.op) << 35 | static_cast<uint64_t>(kind.reduction) << 34 |
           static_cast<uint64_t>(kind.dtype & 63) << 28 | hash_of(signature.extents);
}
TE_GRAPH_ANYWHERE constexpr uint64_t flag_of(uint64_t sequence, uint64_t signature) {
    return sequence << kSignatureBits | signature;
}
TE_GRAPH_ANYWHERE constexpr uint64_t sequence_of(uint64_t flag) { return flag >> kSignatureBits; }
TE_GRAPH_ANYWHERE constexpr OperationKind kind_of(uint64_t flag) {
    return {static_cast<Op>(flag >> 35 & 3), static_cast<Reduction>(flag >> 34 & 1),
            static_cast<uint8_t>(flag >> 28 & 63)};
}
// Whether they can be the extents of the operation that a flag is of. Those of memory that nobody has written cannot.
TE_GRAPH_ANYWHERE constexpr bool fits(const Extents& extents, uint64_t flag) {
    return extents.numel > 0 && extents.before > 0 && extents.behind > 0 &&
           flag_of(sequence_of(flag), pack({kind_of(flag), extents})) == flag;
}
// Of the same operation of the sequence, but another one by kind or extents. 0 is memory that nobody has written yet.
TE_GRAPH_ANYWHERE constexpr bool is_other_operation(uint64_t expected, uint64_t seen) {
    return seen != 0 && expected != seen && sequence_of(expected) == sequence_of(seen);
}

// The state of a rank. Each block of a kernel adds arrival() before it does anything and departure() when it is done;
// what all blocks of a kernel add comes to exactly one more sequence number, so nothing is ever reset and the next
// kernel finds the next number, whatever its grid.
//
//     63 ...... 37   36 ..... 28   27 .... 19   18 ........ 0
//     sequence       departed      inside       launch, signed
//
// A departed block counts 2^9 / blocks, so that the last one carries into the sequence: the number of blocks is a
// power of two. In the lowest field each block but the last adds its launch's number n, and the last one -(blocks - 1)
// n. So a block that arrives while blocks of another kernel are inside finds a sum that its own launch cannot have
// left: two kernels of a group at once on one GPU, which is what two streams without an order between them come to.
// The first block that meets another kernel sees it whatever the grids and the order, which the tests try for all of
// them.
constexpr int kLaunchBits = 19;
constexpr int kInsideBits = 9;
constexpr int kDepartedBits = 9;
constexpr int kSequenceShift = kLaunchBits + kInsideBits + kDepartedBits;
static_assert(kSequenceShift == kSignatureBits);
static_assert(2 * (kMaxBlocks - 1) * kMaxLaunchId < 1 << (kLaunchBits - 1) && kMaxBlocks < 1 << (kInsideBits - 1));

TE_GRAPH_ANYWHERE constexpr uint64_t arrival(int block, int blocks, int launch) {
    const int64_t part = block < blocks - 1 ? launch : -static_cast<int64_t>(blocks - 1) * launch;
    return (1ull << kLaunchBits) + static_cast<uint64_t>(part);
}
TE_GRAPH_ANYWHERE constexpr uint64_t departure(int blocks) {
    return (1ull << (kSequenceShift - kDepartedBits)) * ((1u << kDepartedBits) / blocks) - (1ull << kLaunchBits);
}

struct Arrived {
    uint64_t sequence;
    bool is_alone;  // no block of another kernel has been seen
};
// What a block that found `state` when it arrived knows.
TE_GRAPH_ANYWHERE constexpr Arrived read_state(uint64_t state, int blocks, int launch) {
    // In 32 bits where they are enough: data waits for this.
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
