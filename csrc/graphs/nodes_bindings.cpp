#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "common/kernel_info.h"
#include "graphs/bindings.h"
#include "graphs/capture/graph.h"
#include "graphs/capture/nodes.h"

namespace py = pybind11;

namespace te_graph::graphs {

namespace {

const char* name_of(KernelInfo::Argument::Type type) {
    return type == KernelInfo::Argument::kBool ? "bool" : type == KernelInfo::Argument::kInt32 ? "int" : "float";
}

// Of each kernel the op that launches it, and the types of the arguments that can be set.
py::dict kernel_table() {
    py::dict table;
    for (const KernelInfo& kernel : kernels()) {
        py::dict arguments;
        for (const KernelInfo::Argument& argument : kernel.arguments) {
            arguments[argument.name.c_str()] = name_of(argument.type);
        }
        table[kernel.name.c_str()] = py::make_tuple(kernel.op, arguments);
    }
    return table;
}

#ifdef TE_GRAPH_CUDA

std::vector<KernelNode> find_nodes(const std::shared_ptr<CapturedGraph>& graph, const std::string& name) {
    const auto is_named = [&](const KernelInfo& kernel) { return kernel.name == name; };
    const auto kernel = std::find_if(kernels().begin(), kernels().end(), is_named);
    TORCH_INTERNAL_ASSERT(kernel != kernels().end(), "kernels() lacks ", name);
    const auto cuda_graph = std::dynamic_pointer_cast<CudaGraph>(graph);
    TORCH_INTERNAL_ASSERT(cuda_graph, "kernel nodes of a recorder");
    return KernelNode::find(cuda_graph, *kernel);
}

#endif

}  // namespace

void bind_nodes(py::module_& m) {
    py::class_<CapturedGraph, std::shared_ptr<CapturedGraph>>(m, "CapturedGraph")
        .def(py::init(&make_graph), py::arg("captured"))
        .def_property_readonly("captured", &CapturedGraph::captured);
    m.def("kernels", &kernel_table);
#ifdef TE_GRAPH_CUDA
    py::class_<KernelNode>(m, "KernelNode")
        .def("get", &KernelNode::get, py::arg("argument"))
        .def("set_", &KernelNode::set, py::arg("values"));
    m.def("kernel_nodes", &find_nodes, py::arg("graph"), py::arg("kernel"));
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
