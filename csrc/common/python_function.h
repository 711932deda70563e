// Objects and functions of Python for C++ code that may run, and drop them, on any thread.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <utility>

namespace te_graph {

// An object of Python that may be dropped on any thread.
template <typename T>
std::shared_ptr<T> held_on_any_thread(T object) {
    const auto drop = [](T* held) {
        if (!Py_IsInitialized()) return;  // Python is gone, and its objects with it
        const pybind11::gil_scoped_acquire gil;
        delete held;
    };
    return {new T(std::move(object)), drop};
}

// A function of Python that may be called on any thread, too.
template <typename... Arguments>
std::function<void(Arguments...)> with_gil(pybind11::function function) {
    return [held = held_on_any_thread(std::move(function))](Arguments... arguments) {
        const pybind11::gil_scoped_acquire gil;
        (*held)(arguments...);
    };
}

}  // namespace te_graph
