// Norms over all tensors of a list, without a host sync and independent of how the list is ordered, grouped or
// launched.
//
//   p = 2, 1, other p > 0: (sum |x|^p)^(1/p)     p = inf: max |x|     p = 0: number of elements that are not zero
//
// Arithmetic: the sum of a chunk is taken in fp32 (fp64 for fp64 tensors) in one fixed order, and the chunks' sums are
// added exactly (exact_sum.h). The order within a chunk, with V = 8, 4 or 2 elements of 2, 4 or 8 bytes: element i
// goes to lane i % (256 V), where elements are added in turn; then the V lanes of each t = lane / V in pairs of
// neighbours; then pairs of t at distance 16, 8, 4, 2, 1 within 32; then of those eight at distance 4, 2, 1. NaN and
// infinity propagate in every norm but p = 0.
#pragma once

#include <cmath>
#include <cstring>

#include "multi_tensor/exact_sum.h"
#include "multi_tensor/table.h"

namespace te_graph::multi_tensor {

enum class Norm : uint8_t { kMaximum, kCount, kAbsolute, kSquare, kPower };

// p: >= 0, not NaN.
inline Norm norm_of(double p) {
    if (p == 0) return Norm::kCount;
    if (p == 1) return Norm::kAbsolute;
    if (p == 2) return Norm::kSquare;
    return std::isinf(p) ? Norm::kMaximum : Norm::kPower;
}

// What a partial (exact_sum.h) says. Of kMaximum it has the bits of the largest |x| as fp64 in word 0, NaN above
// infinity, so that partials are joined by MAX.
TE_GRAPH_HOST_DEVICE inline double norm_value(uint64_t* partial, Norm norm, double p) {
    if (norm == Norm::kMaximum) {
        double value;
        memcpy(&value, partial, sizeof(value));
        return value;
    }
    const double sum = rounded_sum(partial);
    if (norm == Norm::kSquare) return sqrt(sum);
    return norm == Norm::kPower ? pow(sum, 1 / p) : sum;
}

// Where a norm goes: `out` is [1], fp32 or fp64, or nullptr to leave it in the partial.
struct NormResult {
    void* out;
    bool is_double;
};

// partial: [kPartialWords], added to; if there is an `out`, it must be zero before and is zero afterwards.
void norm_cpu(const TensorTable& tensors, double p, uint64_t* partial, NormResult result);
// Norm of each entry on its own: out[i] is what norm_cpu gives of entry i alone.
void norms_cpu(const TensorTable& tensors, double p, NormResult result);
void finish_norm_cpu(const uint64_t* partial, double p, NormResult result);

#ifdef TE_GRAPH_CUDA
// Sets a partial to zero.
cudaError_t launch_clear(uint64_t* partial, cudaStream_t stream);
// As on the CPU. No allocation, no host sync. One launch for a table or up to kInlineTensors entries, else several.
// per_entry: `partial` is [count, kPartialWords], a sum for each entry, and `result` is left to others.
cudaError_t launch_norm(const TensorTable& tensors, double p, uint64_t* partial, NormResult result, cudaStream_t stream,
                        bool per_entry = false);
// partials: [count, kPartialWords] scratch memory.
cudaError_t launch_norms(const TensorTable& tensors, double p, uint64_t* partials, NormResult result,
                         cudaStream_t stream);
cudaError_t launch_finish_norm(const uint64_t* partial, double p, NormResult result, cudaStream_t stream);
#endif

}  // namespace te_graph::multi_tensor
