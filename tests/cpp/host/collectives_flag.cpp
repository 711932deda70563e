// What ranks compare (fingerprint.h), and the signal pad of aborts (peers.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <ostream>

#include "collectives/protocols.h"
#include "seed.h"

namespace te_graph::collectives {

static std::ostream& operator<<(std::ostream& out, const Extents& extents) {
    return out << extents.numel << " along dim " << extents.dim << ", " << extents.before << " before, "
               << extents.behind << " behind";
}

namespace {

constexpr uint64_t kSequences = 1ull << kSequenceBits;

// Below 2^40, most of them small.
int64_t random_size(std::mt19937_64& generator) {
    return static_cast<int64_t>(1 + generator() % (1ull << (1 + generator() % 40)));
}
Fingerprint random_fingerprint(std::mt19937_64& generator) {
    return {{static_cast<Op>(generator() % 3), static_cast<Reduction>(generator() % 2),
             static_cast<uint8_t>(generator() % 64), generator() % 2 == 0},
            {random_size(generator), static_cast<int64_t>(generator() % 64), random_size(generator),
             random_size(generator)}};
}
constexpr int64_t Extents::*kParts[] = {&Extents::numel, &Extents::dim, &Extents::before, &Extents::behind};

TEST(Flag, TellsSequenceAndKind) {
    auto generator = seeded_generator();
    for (int i = 0; i < 100000; ++i) {
        const Fingerprint fingerprint = random_fingerprint(generator);
        const uint64_t sequence = generator() % kSequences;
        const uint64_t flag = flag_of(sequence, pack(fingerprint));
        ASSERT_EQ(sequence_of(flag), sequence);
        ASSERT_TRUE(kind_of(flag) == fingerprint.kind);
        ASSERT_LT(pack(fingerprint), 1ull << kFingerprintBits);
    }
}

TEST(Flag, DiffersWhereAnyPartDiffers) {
    auto generator = seeded_generator();
    for (int i = 0; i < 100000; ++i) {
        const Fingerprint fingerprint = random_fingerprint(generator);
        Fingerprint other = fingerprint;
        OperationKind& kind = other.kind;
        switch (generator() % 5) {
            case 0:
                kind.op = static_cast<Op>((static_cast<int>(kind.op) + 1 + generator() % 2) % 3);
                break;
            case 1:
                kind.reduction = kind.reduction == Reduction::kSum ? Reduction::kMax : Reduction::kSum;
                break;
            case 2:
                kind.dtype = (kind.dtype + 1 + generator() % 63) % 64;
                break;
            case 3:
                kind.in_backward = !kind.in_backward;
                break;
            case 4:
                other.extents.*kParts[generator() % 4] += static_cast<int64_t>(1 + generator() % (kHashModulus - 1));
        }
        ASSERT_NE(pack(fingerprint), pack(other)) << fingerprint.extents << " and " << other.extents;
    }
}

TEST(Flag, DiffersWhereASizeDiffersByAPowerOfTwo) {
    auto generator = seeded_generator();
    for (int i = 0; i < 1000; ++i) {
        const Fingerprint fingerprint = random_fingerprint(generator);
        for (const auto part : kParts) {
            const int64_t size = fingerprint.extents.*part;
            for (int power = 0; power < 62; ++power) {
                Fingerprint sum = fingerprint, product = fingerprint;
                sum.extents.*part += int64_t{1} << power;
                ASSERT_NE(pack(fingerprint), pack(sum)) << fingerprint.extents << " and " << sum.extents;
                // A multiple of the modulus is one whatever it is multiplied by.
                const bool is_multiple = size % static_cast<int64_t>(kHashModulus) == 0;
                if (power == 0 || is_multiple || size > std::numeric_limits<int64_t>::max() >> power) continue;
                product.extents.*part <<= power;
                ASSERT_NE(pack(fingerprint), pack(product)) << fingerprint.extents << " and " << product.extents;
            }
        }
    }
}

// All ways to take as many elements as four sizes multiply to for a shape, and each of its dims.
void expect_other_flags_of_other_shapes(const std::array<int64_t, 4>& sizes) {
    std::map<uint64_t, Extents> found;
    const auto add = [&](const Extents& extents) {
        const auto [place, is_new] = found.emplace(pack({{}, extents}), extents);
        EXPECT_TRUE(is_new || place->second == extents) << place->second << " and " << extents;
    };
    std::array<int, 4> order = {0, 1, 2, 3};
    do {
        const auto product = [&](size_t begin, size_t end) {
            int64_t all = 1;
            for (size_t i = begin; i < end; ++i) all *= sizes[order[i]];
            return all;
        };
        for (size_t begin = 0; begin < 4; ++begin) {
            for (size_t end = begin + 1; end <= 4; ++end) {
                // Several sizes may be those of one dimension before.
                for (int64_t dim = begin == 0 ? 0 : 1; dim <= static_cast<int64_t>(begin); ++dim) {
                    add({product(0, 4), dim, product(0, begin), product(end, 4)});
                }
            }
        }
    } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Flag, DiffersBetweenDimsAndShapesOfAsManyElements) {
    constexpr int64_t kUsual[] = {1, 2, 3, 4, 7, 8, 12, 16, 32, 64, 80, 96, 128, 1024, 2048, 4096, 5120, 8192, 14336};
    for (const int64_t a : kUsual) {
        for (const int64_t b : kUsual) {
            for (const int64_t c : kUsual) {
                for (const int64_t d : {1, 2, 3, 8, 128}) expect_other_flags_of_other_shapes({a, b, c, d});
                if (HasFailure()) return;
            }
        }
    }
}

// A pair with equal flags, for tests of code that compares more than flags.
TEST(Flag, HasFewerBitsThanExtents) {
    const Extents extents{6155 * 4 * 1371, 1, 6155, 1371}, other{extents.numel, 1, 2 * 6155, 2 * 1371};
    EXPECT_EQ(pack({{}, extents}), pack({{}, other}));
}

TEST(Flag, FitsTheExtentsThatItWasMadeOf) {
    auto generator = seeded_generator();
    for (int i = 0; i < 100000; ++i) {
        const Fingerprint fingerprint = random_fingerprint(generator);
        const uint64_t flag = flag_of(generator() % kSequences, pack(fingerprint));
        ASSERT_TRUE(fits(fingerprint.extents, flag)) << fingerprint.extents;
        for (const auto part : kParts) {
            Extents other = fingerprint.extents;
            other.*part += static_cast<int64_t>(1 + generator() % (kHashModulus - 1));
            ASSERT_FALSE(fits(other, flag)) << fingerprint.extents << " and " << other;
        }
    }
    // Memory that was not or only partly written, whatever the flag.
    for (const Extents& extents : {Extents{0, 0, 0, 0}, {0, 1, 2, 3}, {24, 1, 0, 3}, {24, 1, 2, 0}}) {
        EXPECT_FALSE(fits(extents, flag_of(7, pack({{}, extents})))) << extents;
    }
}

// What peers write has lines of its own, and so has what follows.
TEST(SignalPad, ConsistsOfWholeLinesAndSeparatesTheAbortFlag) {
    EXPECT_EQ(sizeof(SignalPad) % kLineBytes, 0u);
    EXPECT_EQ(alignof(SignalPad), static_cast<size_t>(kLineBytes));
    EXPECT_GE(offsetof(SignalPad, extents), static_cast<size_t>(kLineBytes));
    for (const int world : {2, 3, 8}) {
        const SlotBytes slots = divide_receive_buffer(int64_t{1} << 20, 2 * (world - 1));
        Peers peers{};
        peers.world = world;
        peers.ll128_slot_bytes = slots.ll128;
        peers.data_slot_bytes = slots.data;
        peers.flag_slot_bytes = slots.flags;
        for (const char* const place : {peers.ll128_slots(0), peers.data_slots(0), peers.flag_slots(0)}) {
            EXPECT_EQ(reinterpret_cast<uintptr_t>(place) % kLineBytes, 0u);
            EXPECT_GE(reinterpret_cast<uintptr_t>(place), sizeof(SignalPad));
        }
    }
}

TEST(Flag, AnotherOperationIsOneOfTheSameSequenceNumber) {
    auto generator = seeded_generator();
    for (int i = 0; i < 10000; ++i) {
        const uint64_t fingerprint = pack(random_fingerprint(generator));
        const uint64_t other = fingerprint ^ 1ull << generator() % kFingerprintBits;
        const uint64_t sequence = generator() % kSequences, earlier = (sequence + kSequences - 2) % kSequences;
        const uint64_t flag = flag_of(sequence, fingerprint);
        ASSERT_FALSE(is_other_operation(flag, flag));
        ASSERT_TRUE(is_other_operation(flag, flag_of(sequence, other)));
        ASSERT_FALSE(is_other_operation(flag, flag_of(earlier, fingerprint)));
        ASSERT_FALSE(is_other_operation(flag, flag_of(earlier, other)));
        ASSERT_FALSE(is_other_operation(flag_of(0, fingerprint), 0));
    }
}

}  // namespace
}  // namespace te_graph::collectives
