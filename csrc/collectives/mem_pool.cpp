#include "collectives/mem_pool.h"

#ifdef TE_GRAPH_CUDA

#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <mutex>

#include "collectives/range_allocator.h"

namespace te_graph::collectives {
namespace {

struct Pool {
    Pool(std::string name, at::Tensor memory, int64_t begin)
        : group(std::move(name)), buffer(std::move(memory)), ranges(begin, buffer.numel()) {}

    char* base() const { return static_cast<char*>(buffer.data_ptr()); }

    void* allocate(size_t bytes, int device) {
        TORCH_CHECK_VALUE(device == buffer.device().index(), "mem_pool of group ", group, ": expected to be used on ",
                          buffer.device(), ", got cuda:", device);
        const std::lock_guard lock(mutex);
        const int64_t offset = ranges.allocate(static_cast<int64_t>(bytes));
        TORCH_CHECK_WITH(OutOfMemoryError, offset >= 0, "the symmetric buffer of group ", group,
                         " is exhausted: its pool has ", ranges.bytes(), " bytes, of which ", ranges.free_bytes(),
                         " are free, and ", bytes,
                         " in one piece were asked for; give PeerGroup a larger buffer_bytes");
        return base() + offset;
    }
    void free(void* memory, size_t bytes) {
        const std::lock_guard lock(mutex);
        ranges.free(static_cast<char*>(memory) - base(), static_cast<int64_t>(bytes));
    }

    const std::string group;
    const at::Tensor buffer;
    std::mutex mutex;
    RangeAllocator ranges;
};

}  // namespace

std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> make_pool_allocator(const std::string& group,
                                                                                    at::Tensor buffer, int64_t begin) {
    const auto pool = std::make_shared<Pool>(group, std::move(buffer), begin);
    return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
        [pool](size_t bytes, int device, cudaStream_t) { return pool->allocate(bytes, device); },
        [pool](void* memory, size_t bytes, int, cudaStream_t) { pool->free(memory, bytes); });
}

}  // namespace te_graph::collectives

#endif
