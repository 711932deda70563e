// MemoryRanges against a map of bytes.
#include "multi_tensor/memory_ranges.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "seed.h"

namespace te_graph::multi_tensor {
namespace {

constexpr size_t kBytes = 64;

// A few stretches of a small memory, some of them empty.
struct Lists {
    std::vector<const void*> begins;
    std::vector<size_t> sizes;

    template <typename Generator>
    Lists(const char* memory, size_t count, size_t most, Generator& generator) {
        for (size_t i = 0; i < count; ++i) {
            const size_t size = generator() % (most + 1);
            begins.push_back(memory + generator() % (kBytes - size + 1));
            sizes.push_back(size);
        }
    }
    bool has(size_t i, const char* byte) const {
        const auto* const begin = static_cast<const char*>(begins[i]);
        return begin <= byte && byte < begin + sizes[i];
    }
    int count(const char* byte) const {
        int count = 0;
        for (size_t i = 0; i < begins.size(); ++i) count += has(i, byte);
        return count;
    }
};

TEST(MemoryRanges, KnowWhichShareAByte) {
    static const char memory[kBytes] = {};
    auto generator = seeded_generator();
    int with_overlap = 0, with_shared = 0;
    for (int round = 0; round < 20000; ++round) {
        const Lists own(memory, generator() % 6, 12, generator), other(memory, generator() % 4, 12, generator);
        const MemoryRanges ranges(own.begins, own.sizes), others(other.begins, other.sizes);
        bool overlap = false, shared = false;
        for (const char& byte : memory) {
            overlap |= own.count(&byte) > 1;
            shared |= own.count(&byte) > 0 && other.count(&byte) > 0;
        }
        ASSERT_EQ(ranges.overlap().has_value(), overlap);
        if (overlap) {
            const auto [a, b] = *ranges.overlap();
            ASSERT_NE(a, b);
            // Each of them has a byte of another one: the first may stand for what it is joined with.
            for (const size_t i : {a, b}) {
                bool is_shared = false;
                for (const char& byte : memory) is_shared |= own.has(i, &byte) && own.count(&byte) > 1;
                ASSERT_TRUE(is_shared);
            }
        }
        ASSERT_EQ(ranges.shared_with(others).has_value(), shared);
        const size_t size = generator() % 8, begin = generator() % (kBytes - size);
        bool is_there = false;
        for (size_t i = begin; i < begin + size; ++i) is_there |= own.count(memory + i) > 0;
        ASSERT_EQ(ranges.find(memory + begin, size).has_value(), is_there);
        if (is_there && !overlap) {
            bool is_in = false;
            const size_t found = *ranges.find(memory + begin, size);
            for (size_t i = begin; i < begin + size; ++i) is_in |= own.has(found, memory + i);
            ASSERT_TRUE(is_in);
        }
        with_overlap += overlap;
        with_shared += shared;
    }
    EXPECT_GT(with_overlap, 1000);
    EXPECT_GT(with_shared, 1000);
}

}  // namespace
}  // namespace te_graph::multi_tensor
