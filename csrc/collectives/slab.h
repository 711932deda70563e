// The memory of a rank that its peers write into, and theirs as this process sees it.
#pragma once

#ifdef TE_GRAPH_CUDA

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace te_graph::collectives {

// Whether stores of one GPU to the other's memory keep 128 bytes together, which lines (lines.h) rely on: over NVLink
// they do, over PCIe they do not. Both are numbers of GPUs that this process sees.
bool has_peer_link(int device, int peer);

// Allocated and mapped by calls that wait for nobody: whoever opens a group compares notes with the others after each
// one, so that a failure on one rank leaves no other waiting. Nobody may free memory that others have mapped: unmap
// first, then wait for all, then let go.
class Slab {
public:
    Slab(at::Device device, int64_t bytes);
    ~Slab();
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    // [bytes] uint8; memory lives as long as this or any other tensor over it.
    const at::Tensor& memory() const { return memory_; }
    // What other processes map it by.
    std::string handle() const;
    // handles: of all ranks. Returns why it cannot be done, or nothing.
    std::string map(const std::vector<std::string>& handles, int rank);
    void unmap();
    // Of all ranks' memory, as this GPU addresses it.
    const std::vector<uint64_t>& places() const { return places_; }
    // [bytes] uint8 of a peer.
    at::Tensor memory_of(int rank) const;
    // Never gives the memory back: somebody who cannot be asked may still write into it.
    void abandon();

private:
    at::Tensor memory_;
    int rank_ = 0;
    std::vector<uint64_t> places_;  // 0: not mapped
};

}  // namespace te_graph::collectives

#endif
