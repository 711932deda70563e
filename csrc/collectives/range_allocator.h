// First-fit allocator of ranges of a block of memory; freed ranges are merged with their neighbours. Manages offsets
// only. No Torch.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace te_graph::collectives {

class RangeAllocator {
public:
    static constexpr int64_t kAlignment = 512;

    // Offsets from `begin` to `end`, `begin` a multiple of kAlignment.
    RangeAllocator(int64_t begin, int64_t end) : bytes_(end - begin) {
        if (begin < end) free_[begin] = end - begin;
    }

    // Offset of a free range, or -1 if none is large enough.
    int64_t allocate(int64_t bytes) {
        const int64_t wanted = rounded(bytes);
        for (auto found = free_.begin(); found != free_.end(); ++found) {
            const auto [offset, size] = *found;
            if (size < wanted) continue;
            free_.erase(found);
            if (size > wanted) free_[offset + wanted] = size - wanted;
            return offset;
        }
        return -1;
    }

    // offset: returned by allocate(bytes).
    void free(int64_t offset, int64_t bytes) {
        const auto here = free_.emplace(offset, rounded(bytes)).first;
        if (const auto next = std::next(here); next != free_.end() && here->first + here->second == next->first) {
            here->second += next->second;
            free_.erase(next);
        }
        if (here == free_.begin()) return;
        const auto before = std::prev(here);
        if (before->first + before->second != here->first) return;
        before->second += here->second;
        free_.erase(here);
    }

    int64_t bytes() const { return bytes_; }
    int64_t free_bytes() const {
        int64_t sum = 0;
        for (const auto& [offset, size] : free_) sum += size;
        return sum;
    }

private:
    static int64_t rounded(int64_t bytes) {
        const int64_t least = bytes < 1 ? 1 : bytes;
        return (least + kAlignment - 1) / kAlignment * kAlignment;
    }

    int64_t bytes_;
    std::map<int64_t, int64_t> free_;  // offset: size
};

}  // namespace te_graph::collectives
