// The course of a warp on the device, see course.h.
#pragma once

#include "collectives/course.h"
#include "collectives/peers.h"

namespace te_graph::collectives {

// kBack: turns for which lines are remembered. kTakes: whether turns are many.
template <int kBack, bool kTakes>
class Course {
public:
    __device__ Course(const Peers& peers, const LaunchArgs& args)
        : taken_(&peers.control->taken[args.launch]),
          count_(static_cast<int>(args.count)),
          step_(static_cast<int>(gridDim.x * blockDim.x) / 32 * kLinesPerWarp) {
        lines_[0] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32 * kLinesPerWarp;
#pragma unroll
        for (int i = 1; i <= kBack; ++i) lines_[i] = kNone;
        next_ = lines_[0] + step_;
    }

    // Whether this warp has a line in the turn that was so many turns ago. The same for all its threads.
    __device__ bool has(int ago) const { return lines_[ago] < count_; }
    // This thread's.
    __device__ int line(int ago) const { return lines_[ago] + line_in_warp(); }
    __device__ int next_line() const { return next_ + line_in_warp(); }

    // To the second turn, once all peers have been heard.
    __device__ void begin() {
        shift();
        next_ += step_;
        if (kTakes) clear();
    }
    __device__ void advance() {
        shift();
        if (next_ >= count_) return;
        if (!kTakes) {
            next_ += step_;
            return;
        }
        const int number = __shfl_sync(~0u, number_, 0);
        next_ = taken_line(number, step_);
        if (next_ < count_) {
            clear();
        } else if (number == last_number(count_, step_) && threadIdx.x % 32 == 0) {
            *taken_ = 0;
        }
    }

private:
    static constexpr int kNone = INT32_MAX - kLinesPerWarp;

    static __device__ int line_in_warp() { return static_cast<int>(threadIdx.x) % 32 / 8; }
    __device__ void shift() {
#pragma unroll
        for (int i = kBack; i > 0; --i) lines_[i] = lines_[i - 1];
        lines_[0] = next_;
    }
    // The answer is looked at a turn later.
    __device__ void clear() {
        if (threadIdx.x % 32 == 0) number_ = static_cast<int>(atomicAdd(taken_, 1));
    }

    uint32_t* const taken_;
    const int count_, step_;
    int lines_[kBack + 1];  // the first of the warp's, by turns ago
    int next_;
    int number_ = 0;  // lane 0's: of what was taken
};

}  // namespace te_graph::collectives
