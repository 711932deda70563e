// Where the tensors of a list lie in memory, and which of them share some. No Torch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace te_graph::multi_tensor {

class MemoryRanges {
public:
    using Pair = std::pair<size_t, size_t>;  // of places in lists

    // begins[i], sizes[i]: of tensor i; sizes in bytes, 0 for those that have no memory.
    MemoryRanges() = default;
    MemoryRanges(const std::vector<const void*>& begins, const std::vector<size_t>& sizes) {
        for (size_t i = 0; i < begins.size(); ++i) {
            const auto* const begin = static_cast<const char*>(begins[i]);
            if (sizes[i] > 0) ranges_.push_back({begin, begin + sizes[i], i});
        }
        std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
        // Joined where they overlap, so that those which are left are ordered by their ends as well.
        size_t count = 0;
        for (const Range& next : ranges_) {
            if (count == 0 || ranges_[count - 1].end <= next.begin) {
                ranges_[count++] = next;
                continue;
            }
            Range& last = ranges_[count - 1];
            if (!overlap_) overlap_ = {last.tensor, next.tensor};
            last.end = std::max(last.end, next.end);
        }
        ranges_.resize(count);
    }

    // Two tensors of the list that share memory.
    const std::optional<Pair>& overlap() const { return overlap_; }

    // A tensor of the list (of several that overlap the one that begins first) that has one of these bytes.
    std::optional<size_t> find(const void* data, size_t size) const {
        const auto* const begin = static_cast<const char*>(data);
        const auto found = std::upper_bound(ranges_.begin(), ranges_.end(), begin,
                                            [](const char* address, const Range& s) { return address < s.end; });
        if (size == 0 || found == ranges_.end() || begin + size <= found->begin) return std::nullopt;
        return found->tensor;
    }

    // A tensor of this list and one of `other` that share memory.
    std::optional<Pair> shared_with(const MemoryRanges& other) const {
        for (const Range& own : ranges_) {
            const auto theirs = other.find(own.begin, static_cast<size_t>(own.end - own.begin));
            if (theirs) return Pair{own.tensor, *theirs};
        }
        return std::nullopt;
    }

private:
    struct Range {
        const char *begin, *end;
        size_t tensor;
    };
    std::vector<Range> ranges_;  // apart from one another, in order
    std::optional<Pair> overlap_;
};

}  // namespace te_graph::multi_tensor
