// Symmetric memory: a buffer of each rank, mapped into the processes of all ranks, and a memory pool in it.
#pragma once

#ifdef TE_GRAPH_CUDA

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <memory>
#include <string>
#include <vector>

namespace te_graph::collectives {

// Whether stores of one GPU to the other's memory keep 128 bytes together, as LL128 requires: over NVLink they do, over
// PCIe they do not. Both are indices of devices visible to this process.
bool has_peer_link(int device, int peer);

// None of its calls waits for a peer: set-up exchanges the result of each call through a rendezvous, so that a failure
// on one rank leaves no other waiting. Memory that peers have mapped must not be freed: all ranks unmap first, then
// meet, then free.
class SymmetricBuffer {
public:
    SymmetricBuffer(at::Device device, int64_t bytes);
    ~SymmetricBuffer();
    SymmetricBuffer(const SymmetricBuffer&) = delete;
    SymmetricBuffer& operator=(const SymmetricBuffer&) = delete;

    // [bytes] uint8; memory lives as long as this or any other tensor over it.
    const at::Tensor& memory() const { return memory_; }
    // The handle by which other processes map it.
    std::string handle() const;
    // handles: of all ranks. Returns the reason of a failure, or an empty string.
    std::string map(const std::vector<std::string>& handles, int rank);
    void unmap();
    // Of all ranks' buffers, in this GPU's address space.
    const std::vector<uint64_t>& addresses() const { return addresses_; }
    // [bytes] uint8 of a peer.
    at::Tensor memory_of(int rank) const;
    // Never frees the memory: a peer that does not answer may still write into it.
    void abandon();

private:
    at::Tensor memory_;
    int rank_ = 0;
    std::vector<uint64_t> addresses_;  // 0: not mapped
};

// A memory pool in the symmetric buffer of a group, for torch.cuda.MemPool.
// buffer: [bytes] uint8, kept alive; the pool is the memory after its first `begin` bytes. Allocation makes no CUDA
// call, so it is possible during a capture.
std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> make_pool_allocator(const std::string& group,
                                                                                    at::Tensor buffer, int64_t begin);

}  // namespace te_graph::collectives

#endif
