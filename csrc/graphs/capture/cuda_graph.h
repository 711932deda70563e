// The CUDA graphs behind graph.h. Empty where te_graph is built without CUDA.
#pragma once

#ifdef TE_GRAPH_CUDA
#include <ATen/core/Generator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "graphs/capture/graph.h"
#include "graphs/python_reference.h"

namespace te_graph::graphs {

class CudaGraph final : public CapturedGraph {
public:
    CudaGraph(const pybind11::object& owner, std::shared_ptr<at::cuda::CUDAGraph> graph);

    void replay() override;
    pybind11::object captured() const override { return owner_.get(); }

    c10::DeviceIndex device() const { return device_; }
    // Whether a replay moves the generator; unknown before the first one.
    std::optional<bool> draws() const { return draws_; }
    // Null where torch has none: before the capture, after reset(), or freed because keep_graph was not asked for.
    cudaGraph_t raw() const;
    // Null until torch has instantiated it.
    cudaGraphExec_t executable() const;

    // Sets each generator, before each replay, to so many numbers after where the last replay of `forward` began.
    void rewind_to(std::shared_ptr<CudaGraph> forward, std::vector<std::pair<at::Generator, uint64_t>> generators);

    // How often the parameters of nodes have been changed since the capture, in raw() and in executable().
    uint64_t changes() const { return changes_; }
    void note_change() { ++changes_; }

private:
    void launch();

    PythonReference owner_;
    std::shared_ptr<at::cuda::CUDAGraph> graph_;
    c10::DeviceIndex device_;
    std::optional<bool> draws_;
    uint64_t changes_ = 0;
    // Of the default generator at the beginning of the last replay, if another graph rewinds to it.
    bool notes_generator_ = false;
    uint64_t seed_ = 0, offset_ = 0;
    std::shared_ptr<CudaGraph> rewound_to_;
    std::vector<std::pair<at::Generator, uint64_t>> rewound_;
};

// Graphs as child nodes of one graph, each after the one before. They stay alive with it, and so does their memory.
class MergedCudaGraph final : public Graph {
public:
    explicit MergedCudaGraph(std::vector<std::shared_ptr<CudaGraph>> parts);
    ~MergedCudaGraph() override;
    MergedCudaGraph(const MergedCudaGraph&) = delete;
    MergedCudaGraph& operator=(const MergedCudaGraph&) = delete;

    // Takes over first what has been changed in the parts.
    void replay() override;

private:
    struct Part {
        std::shared_ptr<CudaGraph> graph;
        cudaGraphNode_t node;
        uint64_t changes;  // that `node` of the executable has
    };

    std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> graph_{nullptr, &cudaGraphDestroy};
    std::vector<Part> parts_;
    cudaGraphExec_t executable_ = nullptr;
};

}  // namespace te_graph::graphs
#endif
