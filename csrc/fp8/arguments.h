// Arguments that FP8 ops have in common, checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <type_traits>

#include "common/arguments_apart.h"
#include "common/check.h"
#include "fp8/cast.h"
#include "fp8/strided.h"

namespace te_graph::fp8 {

// tensor: [...].
inline void check_contiguous(const char* op, const char* argument, const at::Tensor& tensor) {
    check_strided(op, argument, tensor);
    TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": expected ", argument, " to be contiguous, got shape ",
                      tensor.sizes(), " with strides ", tensor.strides());
}

// tensor: [expected].
inline void check_shape(const char* op, const char* argument, const at::Tensor& tensor, at::IntArrayRef expected) {
    TORCH_CHECK_VALUE(tensor.sizes() == expected, op, ": expected ", argument, " of shape ", expected, ", got ",
                      tensor.sizes());
}

// tensor: [shape], whose memory a kernel reads or writes as one piece.
inline void check_buffer(const char* op, const char* argument, const at::Tensor& tensor, at::IntArrayRef shape,
                         at::Device device) {
    check_shape(op, argument, tensor, shape);
    check_contiguous(op, argument, tensor);
    check_device(op, argument, tensor, device);
}

// Where the gradient of a parameter goes, out [shape] of dtype; nothing: a result.
inline void check_grad_out(const char* op, const char* argument, const std::optional<at::Tensor>& out,
                           bool is_asked_for, bool accumulate, at::ScalarType dtype, at::IntArrayRef shape,
                           at::Device device) {
    TORCH_CHECK_VALUE(out || !accumulate, op, ": expected ", argument, ", to which to accumulate, got none");
    if (!out) return;
    TORCH_CHECK_VALUE(is_asked_for, op, ": expected no ", argument, ", which is not asked for, got one");
    check_dtype(op, argument, *out, dtype);
    check_buffer(op, argument, *out, shape, device);
}

// What a message about a dtype calls it: that of a tensor, or an argument that is one.
inline std::string dtype_of(const std::string& argument) {
    return argument.ends_with("dtype") ? argument : argument + " of dtype";
}

inline Format format_of(const char* op, const char* argument, at::ScalarType dtype) {
    TORCH_CHECK_TYPE(dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2, op, ": expected ", dtype_of(argument),
                     " torch.float8_e4m3fn or torch.float8_e5m2, got ", dtype_name(dtype));
    return dtype == at::kFloat8_e4m3fn ? Format::kE4M3 : Format::kE5M2;
}

inline DType wide_dtype_of(const char* op, const char* argument, at::ScalarType dtype) {
    switch (dtype) {
        case at::kFloat:
            return DType::kFloat32;
        case at::kHalf:
            return DType::kFloat16;
        case at::kBFloat16:
            return DType::kBFloat16;
        default:
            TORCH_CHECK_TYPE(false, op, ": expected ", dtype_of(argument),
                             " torch.float32, torch.float16 or torch.bfloat16, got ", dtype_name(dtype));
    }
}

// tensor: [] or [1], fp32.
inline float* scalar_of(const char* op, const char* argument, const at::Tensor& tensor, at::Device device) {
    check_one(op, argument, tensor, device);
    check_dtype(op, argument, tensor, at::kFloat);
    return static_cast<float*>(tensor.data_ptr());
}
inline float* scalar_of(const char* op, const char* argument, const std::optional<at::Tensor>& tensor,
                        at::Device device) {
    return tensor ? scalar_of(op, argument, *tensor, device) : nullptr;
}

// counts: [kCounts] int64.
inline int64_t* counts_of(const char* op, const std::optional<at::Tensor>& counts, at::Device device) {
    if (!counts) return nullptr;
    check_dtype(op, "counts", *counts, at::kLong);
    check_buffer(op, "counts", *counts, {kCounts}, device);
    return static_cast<int64_t*>(counts->data_ptr());
}

// flag: [] or [1], int32, bool or fp32.
inline Flag flag_of(const char* op, const char* argument, const std::optional<at::Tensor>& flag, at::Device device) {
    if (!flag) return {};
    check_one(op, argument, *flag, device);
    const at::ScalarType dtype = flag->scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kInt || dtype == at::kBool || dtype == at::kFloat, op, ": expected ", argument,
                     " of dtype torch.int32, torch.bool or torch.float32, got ", dtype_name(dtype));
    const auto kind = dtype == at::kInt    ? Flag::Kind::kInt32
                      : dtype == at::kBool ? Flag::Kind::kBool
                                           : Flag::Kind::kFloat32;
    return {flag->const_data_ptr(), kind};
}

// vector: [n], of any stride; one that is written (T is not const) has elements of its own.
template <typename T>
Strided<T> strided_of(const char* op, const char* argument, const at::Tensor& vector, int64_t n, at::ScalarType dtype,
                      at::Device device) {
    check_strided(op, argument, vector);
    check_dtype(op, argument, vector, dtype);
    check_shape(op, argument, vector, {n});
    check_device(op, argument, vector, device);
    if constexpr (!std::is_const_v<T>) check_elements_apart(op, argument, vector);
    return {static_cast<T*>(vector.data_ptr()), n == 0 ? 0 : vector.stride(0)};
}

}  // namespace te_graph::fp8
