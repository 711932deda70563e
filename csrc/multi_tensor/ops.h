// What ops over lists of tensors raise, without doing anything: for work on several lists, of which none is to be
// written where another one is at fault.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace te_graph::multi_tensor {

// As the ops of these names; the lists have a tensor.
void check_clip(at::TensorList tensors,        // [...] each
                const at::Tensor& total_norm,  // [] or [1]
                double max_norm, double eps,
                const std::optional<at::Tensor>& found_inf);  // [] or [1]
void check_accumulate(at::TensorList destination,             // [...] each
                      at::TensorList source,                  // [...] each
                      bool store, bool zero_source,
                      const std::optional<at::Tensor>& sum_squares,  // [kPartialWords]
                      const std::optional<at::Tensor>& found_inf,    // [] or [1]
                      const std::optional<at::Tensor>& noop);        // [] or [1]

// Of destinations that have no source: as an accumulate op with these operands, which may write them all the same.
void check_destinations(at::TensorList tensors,  // [...] each
                        bool is_written,
                        const std::optional<at::Tensor>& sum_squares,  // [kPartialWords]
                        const std::optional<at::Tensor>& found_inf,    // [] or [1]
                        const std::optional<at::Tensor>& noop);        // [] or [1]

}  // namespace te_graph::multi_tensor
