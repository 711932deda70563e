// Formula: protocols.h. Grid: blocks of 256 threads, an element per thread and iteration.
// Bytes per element: read once per row, written once. Determinism: the order is that of the rows.
#include <algorithm>

#include "collectives/protocols.h"
#include "collectives/reduce.cuh"

namespace te_graph::collectives {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxGrid = 1024;

template <typename T, typename Out, Reduction kReduction>
__global__ void __launch_bounds__(kThreads)
    reduce_rows_kernel(const T* rows /* [ranks, columns] */, Out* out /* [columns] */, int64_t columns, int ranks,
                       bool is_rounded, float scale, const float* scale_tensor /* [1] */) {
    if (scale_tensor != nullptr) scale *= *scale_tensor;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < columns; i += step) {
        float sum = widen(rows[i]);
        for (int row = 1; row < ranks; ++row) {
            sum = combine<kReduction>(sum, widen(rows[row * columns + i]));
        }
        if constexpr (kReduction == Reduction::kSum) sum *= scale;
        out[i] = narrow<Out>(is_rounded ? widen(narrow<T>(sum)) : sum);
    }
}

}  // namespace

cudaError_t launch_reduce_rows(const Rows& rows, cudaStream_t stream) {
    const auto blocks = static_cast<int>(std::clamp<int64_t>((rows.columns + kThreads - 1) / kThreads, 1, kMaxGrid));
    const auto launch = [&]<typename T, typename Out, Reduction kReduction>() {
        reduce_rows_kernel<T, Out, kReduction>
            <<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(rows.rows), static_cast<Out*>(rows.out),
                                              rows.columns, rows.ranks, rows.is_rounded, rows.scale, rows.scale_tensor);
        return cudaGetLastError();
    };
    if (rows.element != rows.out_element) {
        return launch.template operator()<__nv_bfloat16, float, Reduction::kSum>();
    }
    return with_reduction(rows.element, rows.reduction, [&]<typename T, Reduction kReduction>() {
        return launch.template operator()<T, T, kReduction>();
    });
}

}  // namespace te_graph::collectives
