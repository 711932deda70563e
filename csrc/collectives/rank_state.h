// The state of a rank, a word in which the blocks of a kernel are counted in and out, as plain functions. No Torch.
#pragma once

#include <array>
#include <cstdint>

#include "collectives/fingerprint.h"
#include "common/host_device.h"

namespace te_graph::collectives {

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

// The state of a rank. Each block of a kernel adds arrival() before anything else and departure() when it is done. All
// blocks of a kernel together add exactly one sequence number, so nothing is ever reset and the next kernel finds the
// next number, whatever its grid.
//
//     63 ...... 38   37 ..... 28   27 .... 19   18 ........ 0
//     sequence       departed      inside       launch, signed
//
// A departed block counts 2^10 / blocks, so that the last one carries into the sequence: the number of blocks is a
// power of two. In the lowest field each block but the last adds its launch's number n, and the last one -(blocks - 1)
// n. So a block that arrives while blocks of another kernel are inside finds a sum that its own launch cannot have
// produced: two kernels of a group at once on one GPU, the effect of two streams that are not ordered. The first block
// that meets another kernel detects it for all grids and interleavings (exhaustively tested).
constexpr int kLaunchBits = 19;
constexpr int kInsideBits = 9;
constexpr int kDepartedBits = 10;
constexpr int kSequenceShift = kLaunchBits + kInsideBits + kDepartedBits;
static_assert(kSequenceShift == kFingerprintBits);
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
