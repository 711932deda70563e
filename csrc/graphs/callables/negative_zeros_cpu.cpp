#include <algorithm>

#include "graphs/callables/negative_zeros.h"

namespace te_graph::graphs {

void fill_negative_zeros_cpu(const NegativeZeros* fills, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        std::fill_n(static_cast<uint32_t*>(fills[i].data), fills[i].bytes / static_cast<int64_t>(sizeof(uint32_t)),
                    fills[i].word);
    }
}

}  // namespace te_graph::graphs
