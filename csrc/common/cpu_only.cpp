#include "common/cpu_only.h"

#ifndef TE_GRAPH_CUDA
#include <pybind11/pybind11.h>

#include <string>

namespace te_graph {
namespace {

void refuse(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*) { check_is_built_for(at::kCUDA); }

}  // namespace

void check_is_built_for(at::Device device) {
    if (device.is_cpu()) return;
    std::string sentence;
    {
        const pybind11::gil_scoped_acquire gil;
        sentence = pybind11::str(pybind11::module_::import("te_graph._build").attr("cpu_only")());
    }
    TORCH_CHECK(false, sentence);
}

torch::CppFunction cpu_only() { return torch::CppFunction::makeFromBoxedFunction<&refuse>(); }

}  // namespace te_graph
#endif
