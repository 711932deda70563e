// Nodes of te_graph's own kernels in captured CUDA graphs. Empty where te_graph is built without CUDA.
#pragma once

#ifdef TE_GRAPH_CUDA
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "common/kernel_info.h"
#include "graphs/capture/cuda_graph.h"

namespace te_graph::graphs {

// The value of a scalar argument; index() is its KernelInfo::Argument::Type.
using ArgumentValue = std::variant<bool, int32_t, float>;

// One captured launch. Keeps its graph alive.
class KernelNode {
public:
    // The launches of `kernel` in `graph`, in the order of their capture, those in child graphs included. The runtime
    // does not show the bodies of conditional nodes.
    static std::vector<KernelNode> find(const std::shared_ptr<CudaGraph>& graph, const KernelInfo& kernel);

    // What the next replay passes.
    ArgumentValue get(const std::string& argument) const;
    // Lets later replays pass `values` by name, and all other arguments as before. Launches that are enqueued stay.
    void set(const std::map<std::string, ArgumentValue>& values);

private:
    KernelNode(std::shared_ptr<CudaGraph> graph, const KernelInfo* kernel, const KernelFunction* function,
               cudaGraphNode_t node, cudaGraphNode_t child);

    const KernelInfo::Argument& argument(const std::string& name) const;
    void check_graph() const;

    std::shared_ptr<CudaGraph> graph_;
    cudaGraph_t raw_;  // as it was found: torch may free it
    const KernelInfo* kernel_;
    const KernelFunction* function_;
    cudaGraphNode_t node_;
    cudaGraphNode_t child_;  // the node of the captured graph whose child graph `node_` lies in; or null
};

}  // namespace te_graph::graphs
#endif
