// Plain loops: the specification of the norms. For p = 0, 1, 2 and infinity the CUDA kernels find the same bits.
#include <vector>

#include "multi_tensor/chunk_sum.h"
#include "multi_tensor/norm.h"

namespace te_graph::multi_tensor {
namespace {

template <typename W>
W term(W value, Norm norm, double p) {
    switch (norm) {
        case Norm::kCount:
            return value != 0 ? 1 : 0;
        case Norm::kSquare:
            return value * value;
        case Norm::kPower:
            return std::pow(std::fabs(value), static_cast<W>(p));
        case Norm::kAbsolute:
        case Norm::kMaximum:
            break;
    }
    return std::fabs(value);
}

template <typename T>
double chunk_norm(const T* elements, int64_t begin, int64_t end, Norm norm, double p) {
    using W = Wide<T>;
    const auto term_of = [=](int64_t i) { return term(static_cast<W>(widen(elements[i])), norm, p); };
    if (norm == Norm::kMaximum) {
        return chunk_sum<kVector<T>, W>(begin, end, term_of, [](W a, W b) { return a != a || a > b ? a : b; });
    }
    return chunk_sum<kVector<T>, W>(begin, end, term_of, [](W a, W b) { return a + b; });
}

void add(double sum, Norm norm, uint64_t* partial) {
    if (norm == Norm::kMaximum) {
        partial[0] = std::max(partial[0], double_bits(sum));
    } else {
        add_exactly(sum, [=](int word, uint64_t amount) { partial[word] += amount; });
    }
}

void write_norm(double value, NormResult result, int64_t index) {
    if (result.is_double) {
        static_cast<double*>(result.out)[index] = value;
    } else {
        static_cast<float*>(result.out)[index] = static_cast<float>(value);
    }
}

}  // namespace

void norm_cpu(const TensorTable& tensors, double p, uint64_t* partial, NormResult result) {
    const Norm norm = norm_of(p);
    for_each_chunk(tensors, [&](const TableEntry& entry, int64_t begin, int64_t end) {
        with_type(entry.destination_dtype, [&]<typename T>() {
            add(chunk_norm(static_cast<const T*>(entry.destination), begin, end, norm, p), norm, partial);
        });
    });
    if (result.out == nullptr) return;
    write_norm(norm_value(partial, norm, p), result, 0);
    std::fill_n(partial, kPartialWords, 0);
}

void norms_cpu(const TensorTable& tensors, double p, NormResult result) {
    for (int64_t i = 0; i < tensors.count; ++i) {
        uint64_t partial[kPartialWords] = {};
        norm_cpu({.entries = tensors.entries + i, .count = 1}, p, partial, {});
        write_norm(norm_value(partial, norm_of(p), p), result, i);
    }
}

void finish_norm_cpu(const uint64_t* partial, double p, NormResult result) {
    uint64_t words[kPartialWords];
    std::copy_n(partial, kPartialWords, words);
    write_norm(norm_value(words, norm_of(p), p), result, 0);
}

}  // namespace te_graph::multi_tensor
