// Plain loops: the specification that the CUDA kernel is held to, and the recorder's backend.
#include "common/element_cpu.h"
#include "multi_tensor/accumulate.h"
#include "multi_tensor/chunk_sum.h"
#include "multi_tensor/scale_factor.h"

namespace te_graph::multi_tensor {
namespace {

// What one element is to undergo. Pairs with fp64 on either side, and fp16 with bf16, are computed in fp64.
template <typename Source, typename Destination>
using PairWide =
    std::conditional_t<std::is_same_v<Source, double> || std::is_same_v<Destination, double> ||
                           (sizeof(Source) == 2 && sizeof(Destination) == 2 && !std::is_same_v<Source, Destination>),
                       double, float>;

template <typename Source, typename Destination>
Destination combine(Source source, Destination destination, Mode mode, bool has_scale, double scale) {
    using W = PairWide<Source, Destination>;
    if constexpr (std::is_same_v<Source, Destination>) {
        if (mode == Mode::kStore && !has_scale) return source;
    }
    W value = widen(source);
    if (has_scale) value *= static_cast<W>(scale);
    if (mode == Mode::kAdd) value += static_cast<W>(widen(destination));
    return narrow<Destination>(value);
}

}  // namespace

void accumulate_cpu(const TensorTable& tensors, const Accumulation& accumulation) {
    if (accumulation.noop != nullptr && *accumulation.noop != 0) return;
    const double scale = read(accumulation.scale);
    const bool has_scale = accumulation.scale.data != nullptr || scale != 1;
    bool is_infinite = false;
    const auto accumulate = [&]<typename Source, typename Destination>(const TableEntry& entry, int64_t begin,
                                                                       int64_t end) {
        auto* const from = static_cast<Source*>(const_cast<void*>(entry.source));
        auto* const to = static_cast<Destination*>(entry.destination);
        const Mode mode = accumulation.has_mode ? accumulation.mode : entry.mode;
        if (mode != Mode::kSkip) {
            for (int64_t i = begin; i < end; ++i) {
                to[i] = combine(from[i], mode == Mode::kAdd ? to[i] : Destination{}, mode, has_scale, scale);
                is_infinite |= !is_finite(widen(to[i]));
            }
        }
        if (accumulation.zero_source) std::memset(from + begin, 0, static_cast<size_t>(end - begin) * sizeof(Source));
        if (mode == Mode::kSkip || accumulation.sum_squares == nullptr) return;
        if (!is_supported(entry.source_dtype, entry.destination_dtype)) {
            return add_exactly(NAN, [&](int word, uint64_t amount) { accumulation.sum_squares[word] += amount; });
        }
        using W = Wide<Destination>;
        const auto square = [=](int64_t i) { return static_cast<W>(widen(to[i])) * static_cast<W>(widen(to[i])); };
        const W sum = chunk_sum<kVector<Destination>, W>(begin, end, square, [](W a, W b) { return a + b; });
        add_exactly(sum, [&](int word, uint64_t amount) { accumulation.sum_squares[word] += amount; });
    };
    for_each_chunk(tensors, [&](const TableEntry& entry, int64_t begin, int64_t end) {
        with_type(entry.source_dtype, [&]<typename Source>() {
            with_type(entry.destination_dtype, [&]<typename Destination>() {
                accumulate.template operator()<Source, Destination>(entry, begin, end);
            });
        });
    });
    if (is_infinite && accumulation.found_inf != nullptr) *accumulation.found_inf = 1;
}

void update_entries_cpu(TableEntry* table, const EntryUpdate* updates, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        TableEntry& entry = table[updates[i].entry];
        if (updates[i].has_source) entry.source = updates[i].source;
        entry.destination = updates[i].destination;
        entry.mode = updates[i].mode;
    }
}

}  // namespace te_graph::multi_tensor
