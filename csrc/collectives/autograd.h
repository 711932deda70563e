// Gradients of the collectives, for a loss that is the sum of all ranks' losses.
//
//     all_reduce       the sum of the ranks' gradients
//     reduce_scatter   all_gather
//     all_gather       reduce_scatter
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace te_graph::collectives {

at::Tensor all_reduce_autograd(const at::Tensor& x,  // [...]
                               std::string group, std::string reduction);
at::Tensor reduce_scatter_autograd(const at::Tensor& x,  // [..., world * n, ...]
                                   int64_t dim, int64_t world_size, std::string group, std::string reduction);
at::Tensor all_gather_autograd(const at::Tensor& x,  // [..., n, ...]
                               int64_t dim, int64_t world_size, std::string group);

}  // namespace te_graph::collectives
