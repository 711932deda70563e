#include "graphs/capture/graph.h"

#include <torch/csrc/utils/pybind.h>

#include "graphs/python_reference.h"

#ifdef TE_GRAPH_CUDA
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <mutex>

#include "graphs/capture/cuda_graph.h"
#endif

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

class RecordedGraph final : public CapturedGraph {
public:
    explicit RecordedGraph(const py::object& recorder) : replay_(recorder.attr("replay")) {}
    void replay() override {
        const py::gil_scoped_acquire gil;
        replay_.get()();
    }
    py::object captured() const override { return replay_.get().attr("__self__"); }

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

}  // namespace

std::shared_ptr<CapturedGraph> make_graph(const py::object& captured) {
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
    std::vector<std::shared_ptr<CudaGraph>> on_gpu;
    for (const auto& part : parts) {
        auto graph = std::dynamic_pointer_cast<CudaGraph>(part);
        if (!graph) continue;
        if (graph->draws().value_or(true)) return nullptr;
        on_gpu.push_back(std::move(graph));
    }
    if (on_gpu.size() == parts.size()) return std::make_shared<MergedCudaGraph>(std::move(on_gpu));
#endif
    return std::make_shared<GraphSequence>(parts);
}

void rewind(const std::shared_ptr<CapturedGraph>& forward, const std::shared_ptr<CapturedGraph>& backward,
            std::vector<std::pair<at::Generator, uint64_t>> generators) {
#ifdef TE_GRAPH_CUDA
    std::dynamic_pointer_cast<CudaGraph>(backward)->rewind_to(std::dynamic_pointer_cast<CudaGraph>(forward),
                                                              std::move(generators));
#else
    TORCH_CHECK(false, "te_graph: rewind: te_graph was built without CUDA");
#endif
}

uint64_t offset_in_capture(c10::DeviceIndex device) {
#ifdef TE_GRAPH_CUDA
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device);
    const std::scoped_lock lock(generator.mutex());
    return at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(0).offset_intragraph_;
#else
    TORCH_CHECK(false, "te_graph: offset_in_capture(", device, "): te_graph was built without CUDA");
#endif
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

}  // namespace te_graph::graphs
