#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "graphs/bindings.h"
#include "graphs/graph.h"
#include "graphs/nodes.h"

namespace py = pybind11;

namespace te_graph::graphs {

#ifdef TE_GRAPH_CUDA
namespace {

std::vector<KernelNode> find_nodes(const std::shared_ptr<CapturedGraph>& graph, const std::string& name) {
    const auto is_named = [&](const KernelInfo* kernel) { return kernel->name == name; };
    const auto kernel = std::find_if(kernels().begin(), kernels().end(), is_named);
    TORCH_INTERNAL_ASSERT(kernel != kernels().end(), "kernels() lacks ", name);
    const auto cuda_graph = std::dynamic_pointer_cast<CudaGraph>(graph);
    TORCH_INTERNAL_ASSERT(cuda_graph, "kernel nodes of a recorder");
    return KernelNode::find(cuda_graph, **kernel);
}

// Names of the arguments that can be set, by kernel.
std::map<std::string, std::vector<std::string>> settable_arguments() {
    std::map<std::string, std::vector<std::string>> names;
    for (const KernelInfo* const kernel : kernels()) {
        for (const auto& argument : kernel->arguments) names[kernel->name].emplace_back(argument.name);
    }
    return names;
}

}  // namespace
#endif

void bind_nodes(py::module_& m) {
    py::class_<CapturedGraph, std::shared_ptr<CapturedGraph>>(m, "CapturedGraph")
        .def(py::init(&make_graph), py::arg("captured"))
        .def_property_readonly("captured", &CapturedGraph::captured);
#ifdef TE_GRAPH_CUDA
    py::class_<KernelNode>(m, "KernelNode")
        .def("get", &KernelNode::get, py::arg("argument"))
        .def("set_", &KernelNode::set, py::arg("values"));
    m.def("kernel_nodes", &find_nodes, py::arg("graph"), py::arg("kernel"));
    m.def("settable_arguments", &settable_arguments);
#else
    m.def(
        "kernel_nodes",
        [](const std::shared_ptr<CapturedGraph>&, const std::string& name) -> py::object {
            TORCH_CHECK(false, "te_graph: kernel_nodes(", name, "): te_graph was built without CUDA");
        },
        py::arg("graph"), py::arg("kernel"));
#endif
}

}  // namespace te_graph::graphs
