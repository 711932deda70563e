#include "collectives/symmetric_buffer.h"

#ifdef TE_GRAPH_CUDA

#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <cstring>
#include <mutex>

#include "collectives/range_allocator.h"

namespace te_graph::collectives {
namespace {

// Memory is mapped in pages of this size: no other allocation may share a page with memory that peers map.
constexpr int64_t kPage = 2 << 20;

// -> [bytes] uint8. Not through torch's allocator: memory of expandable segments has no handle of this kind, and blocks
// have neighbours.
at::Tensor allocate(at::Device device, int64_t bytes) {
    const c10::cuda::CUDAGuard guard(device);
    const auto whole = static_cast<size_t>((bytes + kPage - 1) / kPage * kPage);
    void* data = nullptr;
    cudaError_t error = cudaMalloc(&data, whole);
    if (error == cudaErrorMemoryAllocation) {
        static_cast<void>(cudaGetLastError());
        c10::cuda::CUDACachingAllocator::emptyCache();
        error = cudaMalloc(&data, whole);
    }
    C10_CUDA_CHECK(error);
    // At exit CUDA may be torn down before the memory is freed.
    const auto release = [](void* memory) {
        if (cudaFree(memory) != cudaSuccess) static_cast<void>(cudaGetLastError());
    };
    return at::from_blob(data, {bytes}, release, at::TensorOptions(at::kByte).device(device), device);
}

struct Pool {
    // memory: [bytes] uint8.
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

bool has_peer_link(int device, int peer) {
    int can_access = 0, is_atomic = 0;
    C10_CUDA_CHECK(cudaDeviceGetP2PAttribute(&can_access, cudaDevP2PAttrAccessSupported, device, peer));
    C10_CUDA_CHECK(cudaDeviceGetP2PAttribute(&is_atomic, cudaDevP2PAttrNativeAtomicSupported, device, peer));
    return can_access != 0 && is_atomic != 0;
}

SymmetricBuffer::SymmetricBuffer(at::Device device, int64_t bytes) : memory_(allocate(device, bytes)) {}

SymmetricBuffer::~SymmetricBuffer() {
    try {
        unmap();
    } catch (const c10::Error&) {
        // The context has ended, and what it had mapped with it.
    }
}

std::string SymmetricBuffer::handle() const {
    const c10::cuda::CUDAGuard guard(memory_.device());
    cudaIpcMemHandle_t handle;
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&handle, memory_.data_ptr()));
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
}

std::string SymmetricBuffer::map(const std::vector<std::string>& handles, int rank) {
    const c10::cuda::CUDAGuard guard(memory_.device());
    unmap();
    rank_ = rank;
    addresses_.assign(handles.size(), 0);
    for (size_t p = 0; p < handles.size(); ++p) {
        if (static_cast<int>(p) == rank) {
            addresses_[p] = reinterpret_cast<uint64_t>(memory_.data_ptr());
            continue;
        }
        cudaIpcMemHandle_t handle;
        TORCH_CHECK_VALUE(handles[p].size() == sizeof(handle), "SymmetricBuffer: expected a handle of ", sizeof(handle),
                          " bytes, got ", handles[p].size());
        std::memcpy(&handle, handles[p].data(), sizeof(handle));
        void* address = nullptr;
        const cudaError_t error = cudaIpcOpenMemHandle(&address, handle, cudaIpcMemLazyEnablePeerAccess);
        if (error != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            unmap();
            return c10::str("rank ", rank, " cannot map the memory of rank ", p, ": ", cudaGetErrorString(error));
        }
        addresses_[p] = reinterpret_cast<uint64_t>(address);
    }
    return {};
}

void SymmetricBuffer::unmap() {
    if (addresses_.empty()) return;
    const c10::cuda::CUDAGuard guard(memory_.device());
    for (size_t p = 0; p < addresses_.size(); ++p) {
        if (static_cast<int>(p) == rank_ || addresses_[p] == 0) continue;
        if (cudaIpcCloseMemHandle(reinterpret_cast<void*>(addresses_[p])) != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
        }
    }
    addresses_.clear();
}

at::Tensor SymmetricBuffer::memory_of(int rank) const {
    return at::from_blob(
        reinterpret_cast<void*>(addresses_.at(rank)), memory_.sizes(), [](void*) {}, memory_.options(),
        memory_.device());
}

void SymmetricBuffer::abandon() {
    // One more owner, which is never deleted.
    static_cast<void>(new at::Tensor(memory_));
}

std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> make_pool_allocator(const std::string& group,
                                                                                    at::Tensor buffer, int64_t begin) {
    const auto pool = std::make_shared<Pool>(group, std::move(buffer), begin);
    return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
        [pool](size_t bytes, int device, cudaStream_t) { return pool->allocate(bytes, device); },
        [pool](void* memory, size_t bytes, int, cudaStream_t) { pool->free(memory, bytes); });
}

}  // namespace te_graph::collectives

#endif
