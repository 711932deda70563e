#include <torch/csrc/utils/pybind.h>

#include "fp8/weights.h"

namespace py = pybind11;

namespace te_graph::fp8 {

void bind(py::module_& m) {
    using Tensors = WeightTable::Tensors;
    py::class_<WeightTable>(m, "WeightTable")
        .def(py::init([](Tensors weights, Tensors out, Tensors out_t, at::Tensor scale, at::Tensor scale_inv,
                         at::Tensor amax, const std::optional<at::Tensor>& counts, std::vector<std::string> names) {
                 return std::make_unique<WeightTable>(std::move(weights), std::move(out), std::move(out_t),
                                                      std::move(scale), std::move(scale_inv), std::move(amax),
                                                      counts.value_or(at::Tensor()), std::move(names));
             }),
             py::arg("weights"), py::arg("out"), py::arg("out_t"), py::arg("scale"), py::arg("scale_inv"),
             py::arg("amax"), py::arg("counts"), py::arg("names"))
        .def("cast", &WeightTable::cast, py::arg("noop"), py::arg("is_done"))
        .def("stale", &WeightTable::stale)
        .def("check_places", &WeightTable::check_places)
        .def("update", &WeightTable::update, py::arg("weights"))
        .def("weights", &WeightTable::weights)
        .def("tables", &WeightTable::tables);
}

}  // namespace te_graph::fp8
