// Gradients of the collectives, for a loss that is the sum of all ranks' losses.
//
//     all_reduce       the sum of the ranks' gradients
//     reduce_scatter   all_gather
//     all_gather       reduce_scatter
//
// Tangents of forward-mode differentiation are sent by a call of their own, like their primals: x has one on all ranks
// or on none. Forms that write into a given tensor have no derivatives, and reject tensors that need one.
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

void all_reduce_inplace_autograd(const at::Tensor& x,  // [...]
                                 std::string group, std::string reduction);
void all_reduce_out_autograd(const at::Tensor& out,  // [...]
                             const at::Tensor& x,    // [...]
                             std::string group, std::string reduction);
void reduce_scatter_out_autograd(const at::Tensor& out,  // [..., n, ...]
                                 const at::Tensor& x,    // [..., world * n, ...]
                                 int64_t dim, int64_t world_size, std::string group, std::string reduction);
void all_gather_out_autograd(const at::Tensor& out,  // [..., world * n, ...]
                             const at::Tensor& x,    // [..., n, ...]
                             int64_t dim, int64_t world_size, std::string group);

}  // namespace te_graph::collectives
