#include "graph/graph.h"

#include <torch/csrc/utils/pybind.h>

#ifdef TE_GRAPH_CUDA
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace py = pybind11;

namespace te_graph::graph {
namespace {

// A Python object that may be dropped by a thread that does not hold the GIL: autograd destroys nodes on its own
// threads.
class PythonReference {
public:
    explicit PythonReference(py::object object) : object_(std::move(object)) {}
    PythonReference(const PythonReference&) = delete;
    PythonReference& operator=(const PythonReference&) = delete;
    ~PythonReference() {
        if (!Py_IsInitialized()) {
            object_.release();  // the interpreter is gone, and with it the object
            return;
        }
        const py::gil_scoped_acquire gil;
        object_ = py::object();
    }
    const py::object& get() const { return object_; }

private:
    py::object object_;
};

class RecordedGraph final : public Graph {
public:
    explicit RecordedGraph(const py::object& recorder) : replay_(recorder.attr("replay")) {}
    void replay() override {
        const py::gil_scoped_acquire gil;
        replay_.get()();
    }

private:
    PythonReference replay_;
};

class GraphSequence final : public Graph {
public:
    explicit GraphSequence(std::vector<std::shared_ptr<Graph>> parts) : parts_(std::move(parts)) {}
    void replay() override {
        for (const auto& part : parts_) part->replay();
    }

private:
    std::vector<std::shared_ptr<Graph>> parts_;
};

#ifdef TE_GRAPH_CUDA
class CudaGraph final : public Graph {
public:
    CudaGraph(const py::object& owner, std::shared_ptr<at::cuda::CUDAGraph> graph)
        : owner_(owner), graph_(std::move(graph)) {}

    void replay() override {
        if (draws_) {
            graph_->replay();
            return;
        }
        const auto generator = at::cuda::detail::getDefaultCUDAGenerator(c10::cuda::current_device());
        const uint64_t before = generator.get_offset();
        graph_->replay();
        draws_ = generator.get_offset() != before;
    }

    // Whether a replay moves the generator; unknown before the first one.
    std::optional<bool> draws() const { return draws_; }
    cudaGraph_t raw() const { return graph_->raw_cuda_graph(); }

private:
    PythonReference owner_;
    std::shared_ptr<at::cuda::CUDAGraph> graph_;
    std::optional<bool> draws_;
};

// Graphs as child nodes of one graph, each after the one before. They stay alive with it, and so does their memory.
class MergedCudaGraph final : public Graph {
public:
    explicit MergedCudaGraph(const std::vector<std::shared_ptr<Graph>>& parts) : parts_(parts) {
        cudaGraph_t graph = nullptr;
        C10_CUDA_CHECK(cudaGraphCreate(&graph, 0));
        const std::unique_ptr<CUgraph_st, decltype(&cudaGraphDestroy)> owner(graph, &cudaGraphDestroy);
        cudaGraphNode_t last = nullptr;
        for (const auto& part : parts) {
            cudaGraphNode_t node = nullptr;
            C10_CUDA_CHECK(cudaGraphAddChildGraphNode(&node, graph, &last, last ? 1 : 0,
                                                      static_cast<const CudaGraph&>(*part).raw()));
            last = node;
        }
        C10_CUDA_CHECK(cudaGraphInstantiateWithFlags(&executable_, graph, cudaGraphInstantiateFlagUseNodePriority));
    }
    ~MergedCudaGraph() override { C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(executable_)); }
    MergedCudaGraph(const MergedCudaGraph&) = delete;
    MergedCudaGraph& operator=(const MergedCudaGraph&) = delete;

    void replay() override { C10_CUDA_CHECK(cudaGraphLaunch(executable_, c10::cuda::getCurrentCUDAStream())); }

private:
    std::vector<std::shared_ptr<Graph>> parts_;
    cudaGraphExec_t executable_ = nullptr;
};
#endif

}  // namespace

std::shared_ptr<Graph> make_graph(const py::object& captured) {
#ifdef TE_GRAPH_CUDA
    const py::object cuda_graph = py::module_::import("torch.cuda").attr("CUDAGraph");
    if (py::isinstance(captured, cuda_graph)) {
        return std::make_shared<CudaGraph>(captured, py::cast<std::shared_ptr<at::cuda::CUDAGraph>>(captured));
    }
#endif
    return std::make_shared<RecordedGraph>(captured);
}

std::shared_ptr<Graph> merge(const std::vector<std::shared_ptr<Graph>>& parts) {
#ifdef TE_GRAPH_CUDA
    size_t on_gpu = 0;
    for (const auto& part : parts) {
        const auto* const graph = dynamic_cast<const CudaGraph*>(part.get());
        if (!graph) continue;
        if (graph->draws().value_or(true)) return nullptr;
        ++on_gpu;
    }
    if (on_gpu == parts.size()) return std::make_shared<MergedCudaGraph>(parts);
#endif
    return std::make_shared<GraphSequence>(parts);
}

void abandon_pool(c10::DeviceIndex device, std::pair<uint64_t, uint64_t> pool) {
#ifdef TE_GRAPH_CUDA
    // Each refuses a pool that is not in use by a capture: then there is nothing to do.
    try {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool);
        c10::cuda::CUDACachingAllocator::releasePool(device, pool);
    } catch (const c10::Error&) {
    }
    try {
        at::HostAllocator& host = *at::getHostAllocator(at::kCUDA);
        host.end_allocate_to_pool(pool);
        host.release_pool(pool);
    } catch (const c10::Error&) {
    }
#else
    TORCH_CHECK(false, "te_graph: abandon_pool(", device, ", (", pool.first, ", ", pool.second,
                ")): te_graph was built without CUDA");
#endif
}

int64_t node_count(int64_t address) {
#ifdef TE_GRAPH_CUDA
    size_t count = 0;
    C10_CUDA_CHECK(cudaGraphGetNodes(reinterpret_cast<cudaGraph_t>(address), nullptr, &count));
    return static_cast<int64_t>(count);
#else
    TORCH_CHECK(false, "te_graph: node_count(", address, "): te_graph was built without CUDA");
#endif
}

}  // namespace te_graph::graph
