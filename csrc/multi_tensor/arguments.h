// Arguments that ops and plans have in common, checked.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "common/check.h"
#include "common/run_on.h"
#include "multi_tensor/accumulate.h"
#include "multi_tensor/norm.h"
#include "multi_tensor/scale.h"

namespace te_graph::multi_tensor {

inline void check_p(const char* op, double p) {
    TORCH_CHECK_VALUE(p >= 0, op, ": expected p to be 0, positive or inf, got ", p);
}

// tensor: [] or [1], fp32 or fp64.
inline Scalar scalar_of(const char* op, const char* argument, const at::Tensor& tensor, at::Device device) {
    check_one(op, argument, tensor, device);
    const bool is_double = tensor.scalar_type() == at::kDouble;
    if (!is_double) check_dtype(op, argument, tensor, at::kFloat);
    return {.data = tensor.const_data_ptr(), .is_double = is_double};
}

// flag: [] or [1], fp32; nullptr if there is none.
inline float* flag_of(const char* op, const char* argument, const std::optional<at::Tensor>& flag, at::Device device) {
    if (!flag.has_value()) return nullptr;
    check_one(op, argument, *flag, device);
    check_dtype(op, argument, *flag, at::kFloat);
    return static_cast<float*>(flag->mutable_data_ptr());
}

// partial: [kPartialWords] int64.
inline uint64_t* partial_of(const char* op, const char* argument, const at::Tensor& partial, at::Device device) {
    check_dtype(op, argument, partial, at::kLong);
    TORCH_CHECK_VALUE(partial.dim() == 1 && partial.size(0) == kPartialWords && partial.is_contiguous(), op,
                      ": expected ", argument, " contiguous of shape [", kPartialWords, "], got ", partial.sizes());
    check_device(op, argument, partial, device);
    return static_cast<uint64_t*>(partial.mutable_data_ptr());
}

// out: [] or [n], fp32 or fp64.
inline NormResult result_in(const at::Tensor& out) {
    return {.out = out.mutable_data_ptr(), .is_double = out.scalar_type() == at::kDouble};
}

inline at::ScalarType norm_dtype(bool has_double) { return has_double ? at::kDouble : at::kFloat; }

inline Scaling clip_of(const char* op, const at::Tensor& total_norm,  // [] or [1]
                       double max_norm, double eps,
                       const std::optional<at::Tensor>& found_inf,  // [] or [1]
                       at::Device device) {
    TORCH_CHECK_VALUE(max_norm >= 0, op, ": expected max_norm to be 0 or positive, got ", max_norm);
    TORCH_CHECK_VALUE(eps >= 0, op, ": expected eps to be 0 or positive, got ", eps);
    return {.scale = scalar_of(op, "total_norm", total_norm, device),
            .is_clip = true,
            .max_norm = max_norm,
            .eps = eps,
            .found_inf = flag_of(op, "found_inf", found_inf, device)};
}

// The options of an accumulation; of a copy, no `noop`, sums or zeroing.
inline Accumulation accumulation_of(const char* op, const std::optional<at::Tensor>& scale,  // [] or [1]
                                    bool zero_source,
                                    const std::optional<at::Tensor>& sum_squares,  // [kPartialWords]
                                    const std::optional<at::Tensor>& found_inf,    // [] or [1]
                                    const std::optional<at::Tensor>& noop,         // [] or [1]
                                    at::Device device) {
    Accumulation result;
    if (scale) result.scale = scalar_of(op, "scale", *scale, device);
    result.zero_source = zero_source;
    if (sum_squares) result.sum_squares = partial_of(op, "sum_squares", *sum_squares, device);
    result.found_inf = flag_of(op, "found_inf", found_inf, device);
    result.noop = flag_of(op, "noop", noop, device);
    return result;
}

}  // namespace te_graph::multi_tensor
