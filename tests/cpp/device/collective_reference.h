// Collectives on the host, and whether what ranks have is the same bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "collective_ranks.h"
#include "common/element_cpu.h"

namespace te_graph::collectives {

// Reference: one element after the other, in fp32, in the order of the ranks, times the factor, rounded once. What is
// sent in bf16 is rounded to it before.
inline float larger(float a, float b) {
    if (a != a || b != b) return std::nanf("");
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}

template <typename T>
T reduce_one(const std::vector<const char*>& addresses, const Case& now) {
    const bool is_narrow = now.protocol == Protocol::kLamportBf16;
    const auto as_sent = [&](float value) { return is_narrow ? widen(narrow<BFloat16>(value)) : value; };
    float result = 0;
    for (size_t rank = 0; rank < addresses.size(); ++rank) {
        T element;
        std::memcpy(&element, addresses[rank], sizeof(T));
        const float value = as_sent(widen(element));
        result = rank == 0 ? value : now.reduction == Reduction::kSum ? result + value : larger(result, value);
    }
    result *= now.scale;
    return narrow<T>(now.algorithm == Algorithm::kTwoShot ? as_sent(result) : result);
}

template <typename T>
void reduce_all(std::vector<const char*> addresses, int64_t bytes, const Case& now, char* out) {
    for (int64_t i = 0; i < bytes; i += sizeof(T)) {
        const T element = reduce_one<T>(addresses, now);
        std::memcpy(out + i, &element, sizeof(T));
        for (const char*& place : addresses) place += sizeof(T);
    }
}

// All of the memory as it is after the operation.
inline std::vector<char> reference(const Memory& memory) {
    const Case& now = memory.test_case();
    std::vector<char> after = memory.host();
    for (int rank = 0; rank < memory.world(); ++rank) {
        char* const out = &after[memory.out_at(rank)];
        std::vector<const char*> inputs;
        for (int p = 0; p < memory.world(); ++p) inputs.push_back(&memory.host()[memory.input_at(p)]);
        if (now.algorithm == Algorithm::kAllGather) {
            const int64_t piece = memory.input_bytes();
            for (int p = 0; p < memory.world(); ++p) std::memcpy(out + p * piece, inputs[p], piece);
            continue;
        }
        if (now.algorithm == Algorithm::kReduceScatter) {
            for (const char*& input : inputs) input += rank * memory.out_bytes();
        }
        const auto reduce = now.element == Element::kFloat32   ? reduce_all<float>
                            : now.element == Element::kFloat16 ? reduce_all<Float16>
                                                               : reduce_all<BFloat16>;
        reduce(inputs, memory.out_bytes(), now, out);
    }
    return after;
}

// Every NaN of a rank's out with the same bits.
inline void unify_nan(const Memory& memory, std::vector<char>& bytes) {
    const Case& now = memory.test_case();
    if (now.element == Element::kBytes || now.algorithm == Algorithm::kAllGather) return;
    const multi_tensor::Format format = multi_tensor::format_of(dtype_of(now.element));
    const uint64_t nan = format.infinity() | 1;
    for (int rank = 0; rank < memory.world(); ++rank) {
        for (int64_t i = 0; i < memory.out_bytes(); i += format.bytes) {
            char* const place = &bytes[memory.out_at(rank) + i];
            uint64_t bits = 0;
            std::memcpy(&bits, place, format.bytes);
            if (format.is_nan(bits)) std::memcpy(place, &nan, format.bytes);
        }
    }
}

// Equal to the reference in every byte, poison included.
inline testing::AssertionResult is_right(const Memory& memory) {
    std::vector<char> actual = memory.download(), expected = reference(memory);
    unify_nan(memory, actual);
    unify_nan(memory, expected);
    const auto [at, expected_at] = std::mismatch(actual.begin(), actual.end(), expected.begin());
    if (at == actual.end()) return testing::AssertionSuccess();
    const int64_t byte = at - actual.begin();
    int rank = 0;
    while (byte >= memory.end_of(rank)) ++rank;
    return testing::AssertionFailure() << memory.test_case() << ", world " << memory.world() << ": rank " << rank
                                       << ", byte " << byte - memory.out_at(rank) << " of out's " << memory.out_bytes()
                                       << ": expected " << (*expected_at & 0xFF) << ", got " << (*at & 0xFF);
}

}  // namespace te_graph::collectives
