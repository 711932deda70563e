#include "collectives/pool.h"

#ifdef TE_GRAPH_CUDA

#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <mutex>

#include "collectives/ranges.h"

namespace te_graph::collectives {
namespace {

struct Pool {
    Pool(std::string name, at::Tensor memory, int64_t begin)
        : group(std::move(name)), slab(std::move(memory)), ranges(begin, slab.numel()) {}

    char* base() const { return static_cast<char*>(slab.data_ptr()); }

    void* take(size_t bytes, int device) {
        TORCH_CHECK_VALUE(device == slab.device().index(), "mem_pool of group ", group, ": expected to be used on ",
                          slab.device(), ", got cuda:", device);
        const std::lock_guard lock(mutex);
        const int64_t offset = ranges.take(static_cast<int64_t>(bytes));
        TORCH_CHECK_WITH(OutOfMemoryError, offset >= 0, "the slab of group ", group, " is exhausted: its pool has ",
                         ranges.bytes(), " bytes, of which ", ranges.free_bytes(), " are free, and ", bytes,
                         " in one piece were asked for; give PeerGroup a larger slab_bytes");
        return base() + offset;
    }
    void give_back(void* memory, size_t bytes) {
        const std::lock_guard lock(mutex);
        ranges.give_back(static_cast<char*>(memory) - base(), static_cast<int64_t>(bytes));
    }

    const std::string group;
    const at::Tensor slab;
    std::mutex mutex;
    Ranges ranges;
};

}  // namespace

std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> make_pool_allocator(const std::string& group,
                                                                                    at::Tensor slab, int64_t begin) {
    const auto pool = std::make_shared<Pool>(group, std::move(slab), begin);
    return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
        [pool](size_t bytes, int device, cudaStream_t) { return pool->take(bytes, device); },
        [pool](void* memory, size_t bytes, int, cudaStream_t) { pool->give_back(memory, bytes); });
}

}  // namespace te_graph::collectives

#endif
