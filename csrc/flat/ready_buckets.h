// Which buckets are complete while a backward is still under way. No Torch here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace te_graph::flat {

// How often a gradient is accumulated in a backward is not known before: tied weights are, by each callable that has
// them. It is learnt from the backwards before, as in Megatron-LM. One that has never been may be in any backward, on
// some ranks only: its bucket, and those behind, wait for the end.
class ReadyBuckets {
public:
    // sizes: of each bucket, the number of its gradients, which are numbered through.
    explicit ReadyBuckets(const std::vector<size_t>& sizes) : sizes_(sizes), missing_(sizes) {
        for (size_t bucket = 0; bucket < sizes.size(); ++bucket)
            bucket_of_.insert(bucket_of_.end(), sizes[bucket], bucket);
        seen_.resize(bucket_of_.size());
        expected_.resize(bucket_of_.size());
    }

    // From here on what has been accumulated counts.
    void begin() {
        looks_early_ = false;
        next_ = 0;
        std::fill(seen_.begin(), seen_.end(), 0);
        missing_ = sizes_;
    }
    // Buckets are to be told before the end, if that can be.
    void look_early() {
        const auto end = expected_.begin() + sizes_.front();  // of the first bucket, before which none is told
        looks_early_ = std::find(expected_.begin(), end, 0) == end;
    }
    bool looks_early() const { return looks_early_; }
    // False: its bucket has been told already, and what is added to it would be lost.
    bool may_write(size_t gradient) const { return bucket_of_[gradient] >= next_; }
    // Another backward or stream writes gradients, too: from here on buckets are told at the end.
    void stop() { looks_early_ = false; }
    void note_accumulated(size_t gradient) {
        if (++seen_[gradient] == expected_[gradient]) --missing_[bucket_of_[gradient]];
    }
    // The next bucket, if it is complete; they come in their order, the same on all ranks. Each is told once.
    bool take_next(size_t& bucket) {
        if (!looks_early_ || next_ == missing_.size() || missing_[next_] > 0) return false;
        bucket = next_++;
        return true;
    }
    // The backward is over. Returns the first bucket that has not been told.
    size_t end(bool learns) {
        if (learns) {
            for (size_t i = 0; i < seen_.size(); ++i) expected_[i] = std::max(expected_[i], seen_[i]);
        }
        looks_early_ = false;
        return std::exchange(next_, 0);
    }

private:
    std::vector<size_t> bucket_of_;     // [gradients]
    std::vector<int> seen_, expected_;  // [gradients], in this backward and at most in those before
    const std::vector<size_t> sizes_;   // [buckets] how many gradients each has
    std::vector<size_t> missing_;       // [buckets] how many of them have not come as often as expected
    size_t next_ = 0;
    bool looks_early_ = false;
};

}  // namespace te_graph::flat
