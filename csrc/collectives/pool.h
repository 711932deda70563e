// A memory pool in the slab of a group, for torch.cuda.MemPool.
#pragma once

#ifdef TE_GRAPH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <memory>
#include <string>

namespace te_graph::collectives {

// slab: [bytes] uint8, kept alive; the pool is what lies behind its first `begin` bytes. No CUDA call is made when
// memory is handed out, so it may be during a capture.
std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> make_pool_allocator(const std::string& group,
                                                                                    at::Tensor slab, int64_t begin);

}  // namespace te_graph::collectives

#endif
