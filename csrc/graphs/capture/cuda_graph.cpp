#include "graphs/capture/cuda_graph.h"

#ifdef TE_GRAPH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>

namespace te_graph::graphs {

CudaGraph::CudaGraph(const pybind11::object& owner, std::shared_ptr<at::cuda::CUDAGraph> graph)
    : owner_(owner), graph_(std::move(graph)), device_(c10::cuda::current_device()) {}

void CudaGraph::rewind_to(std::shared_ptr<CudaGraph> forward,
                          std::vector<std::pair<at::Generator, uint64_t>> generators) {
    forward->notes_generator_ = true;
    rewound_to_ = std::move(forward);
    rewound_ = std::move(generators);
    draws_ = true;
}

void CudaGraph::replay() {
    for (auto& [generator, offset] : rewound_) {
        const std::scoped_lock lock(generator.mutex());
        generator.set_current_seed(rewound_to_->seed_);
        generator.set_offset(rewound_to_->offset_ + offset);
    }
    if (draws_ && !notes_generator_) {
        graph_->replay();
        return;
    }
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(c10::cuda::current_device());
    if (notes_generator_) {
        const std::scoped_lock lock(generator.mutex());
        seed_ = generator.current_seed();
        offset_ = generator.get_offset();
    }
    const uint64_t before = generator.get_offset();
    graph_->replay();
    draws_ = generator.get_offset() != before;
}

// torch raises where it has none.
cudaGraph_t CudaGraph::raw() const {
    try {
        return graph_->raw_cuda_graph();
    } catch (const c10::Error&) {
        return nullptr;
    }
}

cudaGraphExec_t CudaGraph::executable() const {
    try {
        return graph_->raw_cuda_graph_exec();
    } catch (const c10::Error&) {
        return nullptr;
    }
}

MergedCudaGraph::MergedCudaGraph(std::vector<std::shared_ptr<CudaGraph>> parts) {
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(cudaGraphCreate(&graph, 0));
    graph_.reset(graph);
    cudaGraphNode_t last = nullptr;
    for (auto& part : parts) {
        cudaGraphNode_t node = nullptr;
        C10_CUDA_CHECK(cudaGraphAddChildGraphNode(&node, graph, &last, last ? 1 : 0, part->raw()));
        last = node;
        const uint64_t changes = part->changes();
        parts_.push_back({std::move(part), node, changes});
    }
    C10_CUDA_CHECK(cudaGraphInstantiateWithFlags(&executable_, graph, cudaGraphInstantiateFlagUseNodePriority));
}

MergedCudaGraph::~MergedCudaGraph() { C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(executable_)); }

void MergedCudaGraph::replay() {
    for (Part& part : parts_) {
        if (part.changes == part.graph->changes()) continue;
        C10_CUDA_CHECK(cudaGraphExecChildGraphNodeSetParams(executable_, part.node, part.graph->raw()));
        part.changes = part.graph->changes();
    }
    C10_CUDA_CHECK(cudaGraphLaunch(executable_, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace te_graph::graphs
#endif
