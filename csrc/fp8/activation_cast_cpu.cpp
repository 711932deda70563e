// Activations and their casts on the CPU: the executable specification, each result made in memory of its own.
#include <vector>

#include "fp8/activation_cast.h"
#include "fp8/element_cpu.h"

namespace te_graph::fp8 {
namespace {

// [rows, columns_made].
template <typename T>
std::vector<T> made(const ActivationArguments& work) {
    const auto *const x = static_cast<const T*>(work.x), *const grad = static_cast<const T*>(work.grad);
    const auto f = [&](T element) { return narrow<T>(activated(work.activation, widen(element))); };
    const auto times = [](T a, T b) { return narrow<T>(widen(a) * widen(b)); };
    const auto backward = [&](T dy, T element) {
        return narrow<T>(activation_backward(work.activation, widen(dy), widen(element)));
    };
    const int64_t stride = work.is_gated ? 2 * work.columns : work.columns, made_stride = columns_made(work);
    std::vector<T> result(work.rows * made_stride);
    for (int64_t row = 0; row < work.rows; ++row) {
        const T* const gate = x + row * stride;
        T* const out = result.data() + row * made_stride;
        for (int64_t i = 0; i < work.columns; ++i) {
            const T* const up = work.is_gated ? gate + work.columns + i : nullptr;
            const T* const dy = work.is_backward ? grad + row * work.columns + i : nullptr;
            if (!dy) {
                out[i] = up ? times(f(gate[i]), *up) : f(gate[i]);
            } else {
                out[i] = backward(up ? times(*dy, *up) : *dy, gate[i]);
                if (up) out[work.columns + i] = times(*dy, f(gate[i]));
            }
        }
    }
    return result;
}

}  // namespace

void activation_cast_cpu(const ActivationArguments& work, const Cast& cast, const ColumnSums& sums) {
    with_dtype(work.dtype, [&]<typename T>() {
        const std::vector<T> input = made<T>(work);
        Cast of_made = cast;
        of_made.input = input.data();
        cast_transpose_cpu(of_made, sums, {});
    });
}

void activation_current_scale_cpu(const ActivationArguments& work, const CurrentScale& scale) {
    with_dtype(work.dtype, [&]<typename T>() {
        const std::vector<T> input = made<T>(work);
        CurrentScale of_made = scale;
        of_made.input = input.data();
        current_scale_cpu(of_made);
    });
}

}  // namespace te_graph::fp8
