#include "graphs/guards/found_tensors.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace te_graph::graphs {

FoundTensors::FoundTensors(std::vector<PyObject*> tensors) : objects_(std::move(tensors)) {
    for (PyObject* const object : objects_) {
        Py_INCREF(object);
        impls_.push_back(THPVariable_Unpack(object).unsafeGetTensorImpl());
    }
}

FoundTensors::~FoundTensors() {
    if (!Py_IsInitialized()) return;  // the interpreter is gone, and with it the objects
    const py::gil_scoped_acquire gil;
    for (PyObject* const object : objects_) Py_DECREF(object);
}

int FoundTensors::visit(visitproc visit, void* arg) const {
    for (PyObject* const object : objects_) Py_VISIT(object);
    return 0;
}

}  // namespace te_graph::graphs
