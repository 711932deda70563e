// Products of FP8 matrices, by cuBLASLt. No Torch here.
//
//   out = a_scale_inv * b_scale_inv * (a · bᵀ) + bias, rounded (and then + out, rounded again)
//
// Both matrices have the summed dimension last: Hopper's FP8 tensor cores take no other layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/dtype.h"
#include "fp8/format.h"

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace te_graph::fp8 {

// What sizes, strides and addresses are multiples of, in bytes. cuBLAS 13.1 does not look at addresses itself.
constexpr int64_t kGemmAlignment = 16;

// What a product has in common with others that are computed alike.
struct GemmShape {
    int64_t rows, columns, inner;  // of out, and what is summed over
    int64_t a_stride, b_stride;    // elements from one row to the next
    Format a_format, b_format;     // not both e5m2
    DType dtype;                   // of out
    bool has_bias;
    bool fast_accum;  // adds up with fewer bits
    bool accumulate;  // adds to out
    bool operator==(const GemmShape&) const = default;
};

struct Gemm {
    const uint8_t* a;          // [rows, inner]
    const uint8_t* b;          // [columns, inner]
    const float* a_scale_inv;  // [1]
    const float* b_scale_inv;  // [1]
    const void* bias;          // [columns], of `dtype`, which is fp16 or bf16 then; nullptr: none
    void* out;                 // [rows, columns]
    GemmShape shape;
};

// How the products of a shape are computed.
struct GemmPlanInfo {
    GemmShape shape;
    int device;
    int algorithm, tile, stages, split_k;  // numbers of cuBLASLt
    size_t workspace;                      // bytes
};

#ifdef TE_GRAPH_CUDA

// Chosen once for a shape on a device, by cuBLASLt's heuristics and never by timing, so that all ranks choose alike.
class GemmPlan;

// Whether `device` multiplies FP8 matrices.
bool has_fp8_gemm(int device);

// The plan for `shape` on the current device. Where there is none yet, the heuristics are asked, inside a capture, too.
// Throws std::runtime_error where cuBLASLt has no kernel.
std::shared_ptr<const GemmPlan> gemm_plan(const GemmShape& shape);

size_t workspace_of(const GemmPlan& plan);

// workspace: [workspace_of(plan)] bytes at a multiple of 256, of this launch alone until it is through. No allocation,
// no host sync. Throws std::runtime_error where cuBLASLt does not launch it.
void launch_gemm(const Gemm& work, const GemmPlan& plan, void* workspace, cudaStream_t stream);

#endif

// All plans of this process, those used last first.
std::vector<GemmPlanInfo> gemm_plans();

}  // namespace te_graph::fp8
