// Guards over Python objects, for tests.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "graphs/guards/callable_guard.h"
#include "graphs/guards/function_guard.h"
#include "graphs/guards/value.h"

namespace py = pybind11;

namespace te_graph::graphs {

using namespace pybind11::literals;

inline py::object namespace_of(const py::dict& attributes) {
    return py::module_::import("types").attr("SimpleNamespace")(**attributes);
}

// What a guard compares with `object` by value.
inline std::shared_ptr<const Value> snapshot(const py::object& object) { return Value::of(object.ptr()); }

template <typename Guarding>
class GuardTest : public testing::Test {
protected:
    int step(StepKind kind, int parent, const py::object& key, const py::object& expected, std::string subject) {
        return guard.add_step(kind, parent, key, 0, expected, std::move(subject));
    }
    int position(int parent, int64_t index, const py::object& expected, std::string subject) {
        return guard.add_step(StepKind::kPosition, parent, py::none(), index, expected, std::move(subject));
    }

    const py::gil_scoped_acquire gil;
    const py::object none = py::none();
    Guarding guard;
};

class CallableGuardTest : public GuardTest<CallableGuard> {
protected:
    // What has changed below `root`, or nothing.
    std::string check(const py::object& root) {
        CallableGuard::Tensors tensors;
        const std::string change = guard.check(root.ptr(), tensors);
        EXPECT_EQ(PyErr_Occurred(), nullptr);
        found.clear();
        for (size_t i = 0; tensors && i < tensors->size(); ++i) found.push_back((*tensors)[i]);
        return change;
    }
    std::string check_tensors(const std::vector<at::Tensor>& tensors) {
        std::vector<py::object> owners;
        std::vector<PyObject*> objects;
        for (const at::Tensor& tensor : tensors) objects.push_back(owners.emplace_back(py::cast(tensor)).ptr());
        const FoundTensors as_found(objects);
        const py::gil_scoped_release without_gil;
        return guard.check_tensors(as_found);
    }

    std::vector<at::Tensor> found;
};

}  // namespace te_graph::graphs
