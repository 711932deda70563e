// Plain loops: the specification of scaling, clipping and zeroing.
#include "cpu/element.h"
#include "multi_tensor/factor.h"
#include "multi_tensor/rescale.h"

namespace te_graph::multi_tensor {

void rescale_cpu(const Work& work, const Rescaling& rescaling) {
    if (is_refused(rescaling)) {
        *rescaling.found_inf = 1;
        return;
    }
    const double factor = factor_of(rescaling);
    if (factor == 1 && (rescaling.is_clip || rescaling.found_inf == nullptr)) return;
    bool is_infinite = false;
    for_each_chunk(work, [&](const Entry& entry, int64_t begin, int64_t end) {
        with_type(entry.destination_dtype, [&]<typename T>() {
            auto* const elements = static_cast<T*>(entry.destination);
            const auto wide = static_cast<Wide<T>>(factor);
            for (int64_t i = begin; i < end; ++i) {
                elements[i] = narrow<T>(widen(elements[i]) * wide);
                is_infinite |= !is_finite(widen(elements[i]));
            }
        });
    });
    if (is_infinite && !rescaling.is_clip && rescaling.found_inf != nullptr) *rescaling.found_inf = 1;
}

void zero_cpu(const Work& work) {
    for_each_chunk(work, [](const Entry& entry, int64_t begin, int64_t end) {
        with_type(entry.destination_dtype, [&]<typename T>() {
            std::memset(static_cast<T*>(entry.destination) + begin, 0, static_cast<size_t>(end - begin) * sizeof(T));
        });
    });
}

}  // namespace te_graph::multi_tensor
