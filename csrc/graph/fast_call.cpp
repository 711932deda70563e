#include "graph/fast_call.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace py = pybind11;

namespace te_graph::graph {
namespace {

thread_local int sessions = 0;

// torch.nn.Module and what its calls depend on besides the module itself. Kept for good: it lives as long as torch.
struct ModuleCalls {
    PyObject* type;
    PyObject* call_name;
    PyObject* call;           // as torch made it: who has replaced it wants to see every call
    PyObject* hook_dicts[4];  // of all modules

    static const ModuleCalls& get() {
        static const ModuleCalls calls = [] {
            const py::module_ module = py::module_::import("torch.nn.modules.module");
            ModuleCalls found{};
            found.type = py::object(module.attr("Module")).release().ptr();
            found.call_name = py::str("__call__").release().ptr();
            found.call = py::object(module.attr("Module").attr("__call__")).release().ptr();
            const char* const names[] = {"_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                                         "_global_backward_pre_hooks"};
            for (size_t i = 0; i < 4; ++i) found.hook_dicts[i] = py::object(module.attr(names[i])).release().ptr();
            return found;
        }();
        return calls;
    }

    bool are_plain() const {
        for (PyObject* const hooks : hook_dicts) {
            if (PyDict_GET_SIZE(hooks) > 0) return false;
        }
        return _PyType_Lookup(reinterpret_cast<PyTypeObject*>(type), call_name) == call;
    }
};

constexpr const char* kCapsule = "te_graph.FastCall";

// A value of an instance dictionary, borrowed; nullptr without an error set when it is not there.
PyObject* member(PyObject* object, PyObject* name) {
    PyObject* const members = PyObject_GenericGetDict(object, nullptr);
    if (!members) {
        PyErr_Clear();
        return nullptr;
    }
    PyObject* const found = PyDict_GetItemWithError(members, name);
    Py_DECREF(members);  // the object holds it
    return found;
}

const FastCall* fast_call_of(PyObject* module) {
    static PyObject* const handle_name = PyUnicode_InternFromString("te_graph");
    static PyObject* const fast_name = PyUnicode_InternFromString("fast_call");
    PyObject* const handle = member(module, handle_name);
    PyObject* const fast = handle ? member(handle, fast_name) : nullptr;
    if (!fast || !PyCapsule_CheckExact(fast)) return nullptr;
    return static_cast<const FastCall*>(PyCapsule_GetPointer(fast, kCapsule));
}

// The result of a replay, a new reference; nullptr without an error set when the ordinary way has to be gone.
PyObject* replay(PyObject* module, PyObject* const* args, size_t count) {
    const FastCall* const fast = fast_call_of(module);
    if (!fast || count != fast->tensors || at::GradMode::is_enabled() != fast->grad_mode || sessions > 0 ||
        c10::impl::TorchDispatchModeTLS::stack_len() > 0 || torch::jit::tracer::isTracing() ||
        !ModuleCalls::get().are_plain()) {
        return nullptr;
    }
    for (size_t i = 0; i < count; ++i) {
        if (!THPVariable_Check(args[i])) return nullptr;
        for (size_t other = 0; other < i; ++other) {
            if (args[i] == args[other]) return nullptr;
        }
    }
    thread_local std::vector<at::Tensor> none;
    if (!fast->plain->check(module, none).empty()) return nullptr;
    std::vector<at::Tensor> inputs;
    inputs.reserve(count);
    for (size_t i = 0; i < count; ++i) inputs.push_back(THPVariable_Unpack(args[i]));
    auto outcome = fast->callable->forward(module, inputs);
    auto* const outputs = std::get_if<std::vector<at::Tensor>>(&outcome);
    return outputs ? THPVariable_Wrap(std::move(outputs->front())) : nullptr;
}

PyObject* call(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    HANDLE_TH_ERRORS
    if (!names) {
        if (PyObject* const result = replay(module, args, static_cast<size_t>(count))) return result;
        if (PyErr_Occurred()) return nullptr;
    }
    // Looked up anew: it may have been replaced.
    const ModuleCalls& calls = ModuleCalls::get();
    const auto ordinary = py::reinterpret_steal<py::object>(PyObject_GetAttr(calls.type, calls.call_name));
    if (!ordinary) return nullptr;
    const Py_ssize_t all = count + (names ? PyTuple_GET_SIZE(names) : 0);
    std::vector<PyObject*> with_self{module};
    with_self.insert(with_self.end(), args, args + all);
    return PyObject_Vectorcall(ordinary.ptr(), with_self.data(), static_cast<size_t>(count) + 1, names);
    END_HANDLE_TH_ERRORS
}

PyMethodDef call_definition = {
    "__call__",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),  // NOLINT: what METH_FASTCALL asks for
    METH_FASTCALL | METH_KEYWORDS,
    "Replays the graph of this module, or does what torch.nn.Module.__call__ does.",
};

}  // namespace

py::object to_python(std::unique_ptr<FastCall> fast) {
    const auto drop = [](PyObject* capsule) { delete static_cast<FastCall*>(PyCapsule_GetPointer(capsule, kCapsule)); };
    PyObject* const capsule = PyCapsule_New(fast.get(), kCapsule, drop);
    if (!capsule) throw py::error_already_set();
    fast.release();  // NOLINT: the capsule owns it now
    return py::reinterpret_steal<py::object>(capsule);
}

py::object make_fast_call(const py::object& type) {
    ModuleCalls::get();
    PyObject* const made = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &call_definition);
    if (!made) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

void enter_session() { ++sessions; }
void leave_session() { --sessions; }
bool in_session() { return sessions > 0; }

}  // namespace te_graph::graph
