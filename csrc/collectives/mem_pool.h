// A memory pool in the symmetric buffer of a group, for torch.cuda.MemPool.
#pragma once

#ifdef TE_GRAPH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <memory>
#include <string>

namespace te_graph::collectives {

// buffer: [bytes] uint8, kept alive; the pool is the memory after its first `begin` bytes. Allocation makes no CUDA
// call, so it is possible during a capture.
std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> make_pool_allocator(const std::string& group,
                                                                                    at::Tensor buffer, int64_t begin);

}  // namespace te_graph::collectives

#endif
