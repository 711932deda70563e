// References to Python objects: owned ones that any thread may drop, and weak ones.
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

// What the weak reference `weak` refers to, borrowed from what else holds it; nullptr once it is gone.
inline PyObject* live_object(PyObject* weak) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* live = nullptr;
    PyWeakref_GetRef(weak, &live);
    Py_XDECREF(live);  // others hold it
    return live;
#else
    PyObject* const live = PyWeakref_GetObject(weak);
    return live == Py_None ? nullptr : live;
#endif
}

}  // namespace te_graph::graphs
