// Lists of weights and where their casts go, checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "common/arguments_apart.h"
#include "fp8/cast.h"
#include "multi_tensor/memory_ranges.h"

namespace te_graph::fp8 {

using multi_tensor::MemoryRanges;

// weights: [M_i, N_i] each.
void check_not_empty(const char* op, at::TensorList weights);

// One row for each weight; checks everything. weights, out: [M_i, N_i]; out_t: [N_i, M_i] each, or none at all; scale,
// scale_inv, amax: vectors of any strides that have n elements together, amax none at all where none is recorded;
// counts: [n, kCounts] or undefined. All contiguous but the vectors. noop: [] or [1] or undefined, for its memory
// alone.
std::vector<Cast> casts_of(const char* op, at::TensorList out, at::TensorList out_t, at::TensorList weights,
                           at::TensorList scale, at::TensorList scale_inv, at::TensorList amax,
                           const at::Tensor& counts, const at::Tensor& noop);

// What messages call an element of a list.
std::string at_index(const char* list, size_t i);
void check_count(const char* op, const char* argument, size_t expected, size_t got);
// tensor: [shape].
void check_form(const char* op, const std::string& name, const at::Tensor& tensor, at::IntArrayRef shape,
                at::ScalarType dtype, at::Device device);

// lists: [...] each.
MemoryRanges ranges_of(std::initializer_list<at::TensorList> lists);
// Raises if one of these shares memory with a buffer of a list of casts, or is written where weights are read.
void check_beside(const char* op, const MemoryRanges& buffers, const MemoryRanges& weights,
                  c10::ArrayRef<Argument> arguments);

}  // namespace te_graph::fp8
