// accumulate_cpu and the tables that it works on, against arithmetic in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "accumulate_cases.h"
#include "multi_tensor/exact_sum.h"

namespace te_graph::multi_tensor {
namespace {

// ---- Reference ----
// A number is fraction * 2^exponent in every format. Sums are taken in double and rounded once: double holds more than
// twice the bits of each format but fp64, so the detour rounds as a sum in fp32 does.

double decode(const Format& format, uint64_t bits) {
    const auto exponent = static_cast<int>((bits >> (format.precision - 1)) & format.largest_exponent());
    const auto fraction = static_cast<double>(bits & format.fraction_mask());
    const int smallest = 3 - (1 << (format.exponent_bits - 1)) - format.precision;
    const double sign = bits & format.sign() ? -1.0 : 1.0;
    if (format.is_nan(bits)) return NAN;
    if ((bits & ~format.sign()) == format.infinity()) return sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(fraction, smallest);
    return sign * std::ldexp(fraction + std::ldexp(1.0, format.precision - 1), smallest + exponent - 1);
}

uint64_t encode(const Format& format, double value) {
    const uint64_t sign = std::signbit(value) ? format.sign() : 0;
    if (std::isinf(value)) return sign | format.infinity();
    const int smallest = 3 - (1 << (format.exponent_bits - 1)) - format.precision;
    int magnitude;
    std::frexp(value, &magnitude);
    const int exponent = value == 0 ? smallest : std::max(magnitude - format.precision, smallest);
    // nearbyint rounds to nearest, ties to even; a carry runs on into the exponent, as it shall.
    const auto fraction = static_cast<uint64_t>(std::nearbyint(std::ldexp(std::fabs(value), -exponent)));
    const uint64_t bits = fraction + (static_cast<uint64_t>(exponent - smallest) << (format.precision - 1));
    return sign | std::min(bits, format.infinity());
}

// What `destination` holds afterwards. Operands and results are numbers or infinities, not NaN.
GuardedTensor reference(const GuardedTensor& source, GuardedTensor destination, Mode mode) {
    const Format from = source.format(), to = destination.format();
    for (int64_t i = 0; i < source.numel() && mode != Mode::kSkip; ++i) {
        const double addend = decode(from, source.get(i));
        const double before = mode == Mode::kAdd ? decode(to, destination.get(i)) : 0.0;
        // 0 + -0 is +0: storing must not go through a sum.
        destination.set(i, encode(to, mode == Mode::kAdd ? before + addend : addend));
    }
    return destination;
}

// ---- Accumulation ----

// destination (=|+=) source for one element each; returns the bits.
uint64_t accumulate_one(Pair pair, Mode mode, uint64_t source_bits, uint64_t destination_bits) {
    GuardedTensor source(pair.source, 1, 0), destination(pair.destination, 1, 0);
    source.set(0, source_bits);
    destination.set(0, destination_bits);
    accumulate_on_cpu({entry_of(source, destination, mode)});
    return destination.get(0);
}

double add_numbers(Pair pair, double source, double destination) {
    const Format from = format_of(pair.source), to = format_of(pair.destination);
    return decode(to, accumulate_one(pair, Mode::kAdd, encode(from, source), encode(to, destination)));
}

TEST(AccumulateCpu, EveryPairModeSizeAndOffsetGivesTheBitsOfTheReferenceAndWritesNothingElse) {
    auto generator = seeded_generator();
    for (const Case& now : all_cases()) {
        SCOPED_TRACE(testing::PrintToString(now));
        const auto source = GuardedTensor::random(now.pair.source, now.numel, now.source_offset, generator);
        const auto before = GuardedTensor::random(now.pair.destination, now.numel, now.destination_offset, generator);
        const GuardedTensor source_before = source;
        GuardedTensor destination = before;
        accumulate_on_cpu({entry_of(source, destination, now.mode)});
        ASSERT_TRUE(same_bytes(destination, reference(source, before, now.mode)));
        ASSERT_TRUE(same_bytes(source, source_before));
    }
}

TEST(AccumulateCpu, OneCallServesEntriesOfAllPairsAndModes) {
    auto generator = seeded_generator();
    std::vector<Case> cases = all_cases();
    std::shuffle(cases.begin(), cases.end(), generator);
    cases.resize(60);
    std::vector<GuardedTensor> sources, destinations, expected;
    for (const Case& now : cases) {
        sources.push_back(GuardedTensor::random(now.pair.source, now.numel, now.source_offset, generator));
        destinations.push_back(
            GuardedTensor::random(now.pair.destination, now.numel, now.destination_offset, generator));
        expected.push_back(reference(sources.back(), destinations.back(), now.mode));
    }
    std::vector<TableEntry> table;
    for (size_t i = 0; i < cases.size(); ++i) table.push_back(entry_of(sources[i], destinations[i], cases[i].mode));
    accumulate_on_cpu(table);
    for (size_t i = 0; i < cases.size(); ++i) EXPECT_TRUE(same_bytes(destinations[i], expected[i])) << cases[i];
}

TEST(AccumulateCpu, SkippedSourcesAreZeroedAndOnlyPairsThatOpsAddHaveASumOfSquares) {
    auto generator = seeded_generator();
    for (const DType from : kDTypes) {
        for (const DType to : kDTypes) {
            for (const Mode mode : {Mode::kSkip, Mode::kStore, Mode::kAdd}) {
                auto source = GuardedTensor::random(from, 257, 1, generator);
                const auto before = GuardedTensor::random(to, 257, 1, generator);
                GuardedTensor destination = before, zeros = source;
                for (int64_t i = 0; i < zeros.numel(); ++i) zeros.set(i, 0);
                uint64_t partial[kPartialWords] = {};
                const TableEntry entry = entry_of(source, destination, mode);
                accumulate_cpu({&entry, 1}, {.zero_source = true, .sum_squares = partial});
                ASSERT_TRUE(same_bytes(source, zeros));
                if (mode == Mode::kSkip) {
                    ASSERT_TRUE(same_bytes(destination, before));
                }
                const double sum = rounded_sum(partial);
                if (mode == Mode::kSkip) {
                    EXPECT_EQ(sum, 0);
                } else {
                    EXPECT_TRUE(is_supported(from, to) ? sum > 0 : sum != sum) << sum;
                }
            }
        }
    }
}

TEST(AccumulateCpu, OnlyTheChunksThatAreListedAreWritten) {
    auto generator = seeded_generator();
    const int64_t numel = 3 * kChunkElements + 5;
    for (const Pair pair : kPairs) {
        const auto source = GuardedTensor::random(pair.source, numel, 0, generator);
        const auto before = GuardedTensor::random(pair.destination, numel, 0, generator);
        GuardedTensor destination = before;
        const TableEntry entry = entry_of(source, destination, Mode::kStore);
        const Chunk chunks[] = {{0, 3}, {0, 1}};
        accumulate_cpu({&entry, 0, chunks, 2}, {});

        GuardedTensor expected = reference(source, before, Mode::kStore);
        for (int64_t i = 0; i < 3 * kChunkElements; ++i) {
            if (i / kChunkElements != 1) expected.set(i, before.get(i));
        }
        EXPECT_TRUE(same_bytes(destination, expected));
    }
}

TEST(AccumulateCpu, ASkippedEntryMayHaveNoDestinationAndNoSource) {
    const TableEntry entry{nullptr, nullptr, 9, DType::kFloat32, DType::kFloat32, Mode::kSkip, {}};
    const Chunk chunk{0, 0};
    accumulate_cpu({&entry, 0, &chunk, 1}, {});
    accumulate_cpu({nullptr, 0}, {});
}

TEST(AccumulateCpu, NanAndInfinityPropagate) {
    for (const Pair pair : kPairs) {
        SCOPED_TRACE(format_of(pair.source).name);
        const Format from = format_of(pair.source), to = format_of(pair.destination);
        const uint64_t nan_source = from.infinity() + 1, nan_destination = to.infinity() + 1;
        for (const uint64_t sign : {uint64_t{0}, ~uint64_t{0}}) {
            const uint64_t source = nan_source | (sign & from.sign());
            const uint64_t destination = nan_destination | (sign & to.sign());
            EXPECT_TRUE(to.is_nan(accumulate_one(pair, Mode::kStore, source, 0)));
            EXPECT_TRUE(to.is_nan(accumulate_one(pair, Mode::kAdd, source, encode(to, 1.0))));
            EXPECT_TRUE(to.is_nan(accumulate_one(pair, Mode::kAdd, encode(from, 1.0), destination)));
            // All fraction bits set: rounding up must not carry out of the NaN.
            EXPECT_TRUE(to.is_nan(accumulate_one(pair, Mode::kAdd, ~from.sign() | (sign & from.sign()), 0)));
        }
        EXPECT_EQ(add_numbers(pair, INFINITY, 1.0), INFINITY);
        EXPECT_EQ(add_numbers(pair, -2.0, -INFINITY), -INFINITY);
        EXPECT_TRUE(std::isnan(add_numbers(pair, INFINITY, -INFINITY)));
    }
}

TEST(AccumulateCpu, EveryNanThatIsSummedInBFloat16BecomesTheQuietNan) {
    constexpr Pair pair{DType::kBFloat16, DType::kBFloat16};
    for (const uint64_t nan : {0x7F81, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF}) {
        EXPECT_EQ(accumulate_one(pair, Mode::kAdd, nan, 0x3F80), 0x7FC0u) << nan;
        EXPECT_EQ(accumulate_one(pair, Mode::kAdd, 0x3F80, nan), 0x7FC0u) << nan;
    }
}

TEST(AccumulateCpu, SumsBeyondTheLargestNumberBecomeInfinity) {
    for (const Pair pair : kPairs) {
        const Format to = format_of(pair.destination);
        if (pair.source != pair.destination) continue;
        const double largest = decode(to, to.infinity() - 1);
        EXPECT_EQ(add_numbers(pair, largest, largest), INFINITY) << to.name;
        EXPECT_EQ(add_numbers(pair, -largest, -largest), -INFINITY) << to.name;
        EXPECT_EQ(add_numbers(pair, largest, -largest), 0.0) << to.name;
    }
}

TEST(AccumulateCpu, HalfwayCasesRoundToEvenAndTheirNeighboursToTheNearest) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
        const Format format = format_of(dtype);
        const Pair pair{dtype, dtype};
        const double ulp = std::ldexp(1.0, 1 - format.precision);  // of numbers in [1, 2)
        EXPECT_EQ(add_numbers(pair, ulp / 2, 1), 1) << format.name;
        EXPECT_EQ(add_numbers(pair, ulp / 2, 1 + ulp), 1 + 2 * ulp) << format.name;
        EXPECT_EQ(add_numbers(pair, ulp / 2, 1 + 2 * ulp), 1 + 2 * ulp) << format.name;
        EXPECT_EQ(add_numbers(pair, -ulp / 2, -1 - ulp), -1 - 2 * ulp) << format.name;
        EXPECT_EQ(add_numbers(pair, ulp / 2 * (1 + ulp), 1), 1 + ulp) << format.name;
        EXPECT_EQ(add_numbers(pair, ulp / 2 * (1 - ulp), 1 + ulp), 1 + ulp) << format.name;
        // A carry into the next power of two.
        EXPECT_EQ(add_numbers(pair, ulp / 2, 2 - ulp), 2) << format.name;
    }
}

TEST(AccumulateCpu, StoringIntoTheSameDtypeKeepsEveryBitPattern) {
    auto generator = seeded_generator();
    for (const DType dtype : kDTypes) {
        const Format format = format_of(dtype);
        GuardedTensor source(dtype, 1 << 16, 0);
        for (int64_t i = 0; i < source.numel(); ++i) {
            source.set(i, format.bytes == 2 ? i : generator() >> (64 - 8 * format.bytes));
        }
        source.set(0, format.sign());          // -0
        source.set(1, format.infinity() | 5);  // a signalling NaN
        source.set(2, format.sign() | format.infinity() | format.fraction_mask());
        GuardedTensor destination = GuardedTensor::random(dtype, source.numel(), 0, generator);
        accumulate_on_cpu({entry_of(source, destination, Mode::kStore)});
        EXPECT_TRUE(same_bytes(destination, source)) << format.name;
    }
}

TEST(AccumulateCpu, WideningIsExactForEveryBitPattern) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        GuardedTensor source(dtype, 1 << 16, 0), destination(DType::kFloat32, 1 << 16, 0);
        for (int64_t i = 0; i < source.numel(); ++i) source.set(i, i);
        accumulate_on_cpu({entry_of(source, destination, Mode::kStore)});
        for (int64_t i = 0; i < source.numel(); ++i) {
            if (source.format().is_nan(i)) {
                ASSERT_TRUE(destination.format().is_nan(destination.get(i))) << i;
            } else {
                ASSERT_EQ(destination.get(i), encode(destination.format(), decode(source.format(), i))) << i;
            }
        }
    }
}

// ---- Tables ----

TEST(IsSupported, ExactlyTheListedPairsAre) {
    for (const DType source : kDTypes) {
        for (const DType destination : kDTypes) {
            const bool listed = std::any_of(std::begin(kPairs), std::end(kPairs), [&](const Pair& pair) {
                return pair.source == source && pair.destination == destination;
            });
            EXPECT_EQ(is_supported(source, destination), listed)
                << format_of(source).name << " into " << format_of(destination).name;
        }
    }
}

TEST(MakeChunks, CoverEveryElementOnceInOrderWithoutAnEmptyChunk) {
    auto generator = seeded_generator();
    for (int round = 0; round < 200; ++round) {
        std::vector<int64_t> numels(generator() % 20);
        for (int64_t& numel : numels) {
            const auto around = static_cast<int64_t>(generator() % 4) * kChunkElements;
            numel = std::max<int64_t>(0, around + static_cast<int64_t>(generator() % 5) - 2);
            if (generator() % 2) numel = static_cast<int64_t>(generator() % 40000);
        }
        std::vector<int64_t> covered(numels.size());
        int32_t last_entry = 0;
        for (const Chunk& chunk : make_chunks(numels)) {
            ASSERT_GE(chunk.entry, last_entry);
            ASSERT_LT(chunk.entry, static_cast<int32_t>(numels.size()));
            last_entry = chunk.entry;
            const int64_t begin = chunk.index * kChunkElements;
            const int64_t end = std::min(begin + kChunkElements, numels[chunk.entry]);
            ASSERT_EQ(begin, covered[chunk.entry]);  // neither a gap nor an overlap
            ASSERT_LT(begin, end);
            covered[chunk.entry] = end;
        }
        ASSERT_EQ(covered, numels);
    }
}

TEST(MakeChunks, CountBeyondTwoToThe31Elements) {
    const int64_t numel = (int64_t{1} << 31) + kChunkElements + 1;
    const auto chunks = make_chunks({1, numel});
    ASSERT_EQ(chunks.size(), 1u + (1u << 18) + 2u);
    EXPECT_EQ(chunks.back().entry, 1);
    EXPECT_EQ(chunks.back().index * kChunkElements, numel - 1);
}

TEST(UpdateEntries, ChangeDestinationModeAndGivenSourcesOfTheNamedEntriesAndNothingElse) {
    auto generator = seeded_generator();
    std::vector<TableEntry> table(50);
    for (TableEntry& entry : table) {
        entry = {reinterpret_cast<const void*>(generator()),
                 reinterpret_cast<void*>(generator()),
                 static_cast<int64_t>(generator()),
                 DType::kBFloat16,
                 DType::kFloat32,
                 Mode::kStore,
                 {1, 2, 3, 4, 5}};
    }
    std::vector<TableEntry> expected = table;
    std::vector<EntryUpdate> updates;
    for (const int32_t index : {49, 0, 17, 18}) {
        void* const destination = reinterpret_cast<void*>(generator());
        const Mode mode = index % 2 ? Mode::kAdd : Mode::kSkip;
        const void* const source = reinterpret_cast<const void*>(generator());
        const bool has_source = index > 17;
        updates.push_back({source, destination, index, mode, has_source});
        if (has_source) expected[index].source = source;
        expected[index].destination = destination;
        expected[index].mode = mode;
    }
    update_entries_cpu(table.data(), updates.data(), 0);
    EXPECT_NE(std::memcmp(table.data(), expected.data(), table.size() * sizeof(TableEntry)), 0);
    update_entries_cpu(table.data(), updates.data(), static_cast<int64_t>(updates.size()));
    EXPECT_EQ(std::memcmp(table.data(), expected.data(), table.size() * sizeof(TableEntry)), 0);
}

}  // namespace
}  // namespace te_graph::multi_tensor
