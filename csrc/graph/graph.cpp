#include "graph/graph.h"

#include <torch/csrc/utils/pybind.h>

#ifdef TE_GRAPH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAException.h>
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

#ifdef TE_GRAPH_CUDA
class CudaGraph final : public Graph {
public:
    CudaGraph(const py::object& owner, std::shared_ptr<at::cuda::CUDAGraph> graph)
        : owner_(owner), graph_(std::move(graph)) {}
    void replay() override { graph_->replay(); }

private:
    PythonReference owner_;
    std::shared_ptr<at::cuda::CUDAGraph> graph_;
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
