// Plain loops: the specification of scaling, clipping and zeroing.
#include "common/element_cpu.h"
#include "multi_tensor/scale.h"
#include "multi_tensor/scale_factor.h"

namespace te_graph::multi_tensor {

void scale_cpu(const TensorTable& tensors, const Scaling& scaling) {
    if (is_refused(scaling)) {
        *scaling.found_inf = 1;
        return;
    }
    const double factor = factor_of(scaling);
    if (factor == 1 && (scaling.is_clip || scaling.found_inf == nullptr)) return;
    bool is_infinite = false;
    for_each_chunk(tensors, [&](const TableEntry& entry, int64_t begin, int64_t end) {
        with_type(entry.destination_dtype, [&]<typename T>() {
            auto* const elements = static_cast<T*>(entry.destination);
            const auto wide = static_cast<Wide<T>>(factor);
            for (int64_t i = begin; i < end; ++i) {
                elements[i] = narrow<T>(widen(elements[i]) * wide);
                is_infinite |= !is_finite(widen(elements[i]));
            }
        });
    });
    if (is_infinite && !scaling.is_clip && scaling.found_inf != nullptr) *scaling.found_inf = 1;
}

void zero_cpu(const TensorTable& tensors) {
    for_each_chunk(tensors, [](const TableEntry& entry, int64_t begin, int64_t end) {
        with_type(entry.destination_dtype, [&]<typename T>() {
            std::memset(static_cast<T*>(entry.destination) + begin, 0, static_cast<size_t>(end - begin) * sizeof(T));
        });
    });
}

}  // namespace te_graph::multi_tensor
