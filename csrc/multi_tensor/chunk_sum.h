// The sum over one chunk, in the order that norm.h fixes.
#pragma once

#include <algorithm>

#include "common/element_cpu.h"
#include "multi_tensor/norm.h"

namespace te_graph::multi_tensor {

// join(a, b) of two results; term(i) of element i, which is of kGroup to 16 bytes.
template <int kGroup, typename W, typename Term, typename Join>
W chunk_sum(int64_t begin, int64_t end, const Term& term, const Join& join) {
    constexpr int kWarp = 32, kLanes = kThreads * kGroup;
    W lanes[kLanes] = {};
    for (int64_t first = begin; first < end; first += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, end - first);
        for (int64_t k = 0; k < count; ++k) lanes[k] = join(lanes[k], term(first + k));
    }
    // Neighbours in pairs within each group, whose sum is then in its first lane.
    for (int width = 1; width < kGroup; width *= 2) {
        for (int k = 0; k < kLanes; k += 2 * width) lanes[k] = join(lanes[k], lanes[k + width]);
    }
    const auto halve = [&](int first, int stride, int count) {
        for (int distance = count / 2; distance > 0; distance /= 2) {
            for (int k = 0; k < distance; ++k) {
                W& sum = lanes[first + k * stride];
                sum = join(sum, lanes[first + (k + distance) * stride]);
            }
        }
    };
    for (int warp = 0; warp < kThreads / kWarp; ++warp) halve(warp * kWarp * kGroup, kGroup, kWarp);
    halve(0, kWarp * kGroup, kThreads / kWarp);
    return lanes[0];
}

}  // namespace te_graph::multi_tensor
