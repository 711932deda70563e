#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace te_graph::graphs {

// A Python object that may be dropped by a thread that does not hold the GIL: autograd destroys nodes on its own
// threads.
class PythonReference {
public:
    explicit PythonReference(pybind11::object object) : object_(std::move(object)) {}
    PythonReference(const PythonReference&) = delete;
    PythonReference& operator=(const PythonReference&) = delete;
    ~PythonReference() {
        if (!Py_IsInitialized()) {
            object_.release();  // the interpreter is gone, and with it the object
            return;
        }
        const pybind11::gil_scoped_acquire gil;
        object_ = pybind11::object();
    }
    const pybind11::object& get() const { return object_; }

private:
    pybind11::object object_;
};

}  // namespace te_graph::graphs
