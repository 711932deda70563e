#include "graphs/callables/fast_call.h"

#include <ATen/core/grad_mode.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "graphs/modes.h"

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

PyObject* lookup(PyTypeObject* type, PyObject* name) { return _PyType_Lookup(type, name); }

// What the call of a module consists of. Kept for good: it lives as long as torch.
struct ModuleCalls {
    PyObject *call_name, *call_impl_name, *forward_name, *own_forward_name;
    PyObject *call, *call_impl;  // of torch.nn.Module, as torch made them: a replacement is there to see every call
    PyObject* hook_dicts[4];     // of all modules

    static const ModuleCalls& get() {
        PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<ModuleCalls> calls;
        const auto find = [] {
            const py::module_ module = py::module_::import("torch.nn.modules.module");
            const py::object type = module.attr("Module");
            const auto own = [](const py::object& object) { return py::object(object).release().ptr(); };
            ModuleCalls found{};
            found.call_name = PyUnicode_InternFromString("__call__");
            found.call_impl_name = PyUnicode_InternFromString("_call_impl");
            found.forward_name = PyUnicode_InternFromString("forward");
            found.own_forward_name = PyUnicode_InternFromString("_te_graph_forward");
            found.call = own(type.attr("_wrapped_call_impl"));
            found.call_impl = own(type.attr("_call_impl"));
            const char* const names[] = {"_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                                         "_global_backward_pre_hooks"};
            for (size_t i = 0; i < 4; ++i) found.hook_dicts[i] = own(module.attr(names[i]));
            return found;
        };
        return calls.call_once_and_store_result(find).get_stored();
    }

    bool are_hooked() const {
        return std::any_of(std::begin(hook_dicts), std::end(hook_dicts),
                           [](PyObject* hooks) { return PyDict_GET_SIZE(hooks) > 0; });
    }
    // True when a class made for graphed modules calls its own forward, and the class below would have called its own.
    bool are_plain_of(PyTypeObject* type) const {
        PyObject* const forward = lookup(type, forward_name);
        return forward && forward == lookup(type, own_forward_name) && lookup(type, call_impl_name) == call_impl &&
               lookup_below(type, call_name) == call;
    }

private:
    // What `name` would be without the dictionary of `type` itself; borrowed, null without an error set.
    static PyObject* lookup_below(PyTypeObject* type, PyObject* name) {
        PyObject* const order = type->tp_mro;
        for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(order); ++i) {
            PyObject* const members = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(order, i))->tp_dict;
            if (PyObject* const found = members ? PyDict_GetItemWithError(members, name) : nullptr) return found;
        }
        return nullptr;
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

FastCall* fast_call_of(PyObject* module) {
    static PyObject* const handle_name = PyUnicode_InternFromString("te_graph");
    static PyObject* const fast_name = PyUnicode_InternFromString("fast_call");
    PyObject* const handle = member(module, handle_name);
    PyObject* const fast = handle ? member(handle, fast_name) : nullptr;
    if (!fast || !PyCapsule_CheckExact(fast)) return nullptr;
    return static_cast<FastCall*>(PyCapsule_GetPointer(fast, kCapsule));
}

// Any change of a class or of one below gives it another version; it has none until something is looked up.
bool is_plain_class(PyTypeObject* type, FastCall& fast) {
    if (type->tp_version_tag != 0 && type->tp_version_tag == fast.plain_class) return true;
    if (!ModuleCalls::get().are_plain_of(type)) return false;
    fast.plain_class = type->tp_version_tag;
    return true;
}

// The result of a replay, a new reference; nullptr without an error set when the ordinary way has to be gone.
PyObject* replay(PyObject* module, PyObject* const* args, size_t count) {
    FastCall* const fast = fast_call_of(module);
    if (!fast || count != fast->tensors || at::GradMode::is_enabled() != fast->grad_mode || in_session() ||
        ModuleCalls::get().are_hooked() || !is_plain_class(Py_TYPE(module), *fast)) {
        return nullptr;
    }
    for (size_t i = 0; i < count; ++i) {
        if (!THPVariable_CheckExact(args[i])) return nullptr;  // a subclass may want to see the operations
        for (size_t other = 0; other < i; ++other) {
            if (args[i] == args[other]) return nullptr;
        }
    }
    CallableGuard::Tensors none;
    if (!fast->plain->check(module, none).empty()) return nullptr;
    std::vector<at::Tensor> inputs;
    inputs.reserve(count);
    for (size_t i = 0; i < count; ++i) inputs.push_back(THPVariable_Unpack(args[i]));
    const auto callable = fast->callable;  // what it runs may take the module apart
    auto outcome = callable->forward(module, inputs);
    auto* const outputs = std::get_if<std::vector<at::Tensor>>(&outcome);
    return outputs ? THPVariable_Wrap(std::move(outputs->front())) : nullptr;
}

// What stands as __call__ in a class made for graphed modules. A method descriptor of Python's own would do, but
// torch.compile warns of those: it sees what the class shows of this one, a function that it is told to leave alone.
struct GraphedCall {
    PyObject_HEAD vectorcallfunc vectorcall;
    PyObject* shown;  // a function of te_graph, which lives as long
};

// As `__call__` of an instance, or of a class.
PyObject* graphed_call_get(PyObject* self, PyObject* module, PyObject*) {
    if (module) return PyMethod_New(self, module);
    return Py_NewRef(reinterpret_cast<GraphedCall*>(self)->shown);
}

void graphed_call_free(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<GraphedCall*>(self)->shown);
    type->tp_free(self);
    Py_DECREF(type);
}

PyTypeObject* graphed_call_type() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<PyTypeObject*> type;
    const auto make = [] {
        static PyMemberDef members[] = {
            {"__vectorcalloffset__", T_PYSSIZET, offsetof(GraphedCall, vectorcall), READONLY, nullptr},
            {nullptr, 0, 0, 0, nullptr},
        };
        static PyType_Slot slots[] = {
            {Py_tp_members, members},
            {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
            {Py_tp_descr_get, reinterpret_cast<void*>(&graphed_call_get)},
            {Py_tp_dealloc, reinterpret_cast<void*>(&graphed_call_free)},
            {0, nullptr},
        };
        static PyType_Spec spec = {"te_graph._C.GraphedCall", sizeof(GraphedCall), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
                                   slots};
        PyObject* const made = PyType_FromSpec(&spec);
        if (!made) throw py::error_already_set();
        return reinterpret_cast<PyTypeObject*>(made);
    };
    return type.call_once_and_store_result(make).get_stored();
}

// super().__call__, for the class that has our __call__; null with an error set.
py::object call_below(PyObject* module) {
    PyObject* const name = ModuleCalls::get().call_name;
    PyObject* const order = Py_TYPE(module)->tp_mro;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(order); ++i) {
        PyObject* const type = PyTuple_GET_ITEM(order, i);
        PyObject* const members = reinterpret_cast<PyTypeObject*>(type)->tp_dict;
        PyObject* const made = members ? PyDict_GetItemWithError(members, name) : nullptr;
        if (!made || !Py_IS_TYPE(made, graphed_call_type())) continue;
        const auto super = py::reinterpret_steal<py::object>(
            PyObject_CallFunctionObjArgs(reinterpret_cast<PyObject*>(&PySuper_Type), type, module, nullptr));
        return py::reinterpret_steal<py::object>(super ? PyObject_GetAttr(super.ptr(), name) : nullptr);
    }
    PyErr_SetString(PyExc_TypeError, "te_graph: __call__ of a graphed module is called on another object");
    return {};
}

// Replays the graph of a module, the first argument, or does what the class below does.
PyObject* call(PyObject*, PyObject* const* args, size_t flags, PyObject* names) {
    HANDLE_TH_ERRORS
    const auto count = static_cast<size_t>(PyVectorcall_NARGS(flags));
    if (count == 0) {
        PyErr_SetString(PyExc_TypeError, "te_graph: __call__ of a graphed module is called on nothing");
        return nullptr;
    }
    PyObject* const module = args[0];
    if (!names) {
        if (PyObject* const result = replay(module, args + 1, count - 1)) return result;
        if (PyErr_Occurred()) return nullptr;
    }
    const auto ordinary = call_below(module);
    if (!ordinary) return nullptr;
    return PyObject_Vectorcall(ordinary.ptr(), args + 1, count - 1, names);
    END_HANDLE_TH_ERRORS
}

}  // namespace

py::object to_python(std::unique_ptr<FastCall> fast) {
    const auto drop = [](PyObject* capsule) { delete static_cast<FastCall*>(PyCapsule_GetPointer(capsule, kCapsule)); };
    PyObject* const capsule = PyCapsule_New(fast.get(), kCapsule, drop);
    if (!capsule) throw py::error_already_set();
    fast.release();  // NOLINT: the capsule owns it now
    return py::reinterpret_steal<py::object>(capsule);
}

void prepare_fast_calls() { ModuleCalls::get(); }

py::object make_fast_call(const py::object& shown) {
    PyTypeObject* const type = graphed_call_type();
    PyObject* const made = type->tp_alloc(type, 0);
    if (!made) throw py::error_already_set();
    auto* const graphed_call = reinterpret_cast<GraphedCall*>(made);
    graphed_call->vectorcall = &call;
    graphed_call->shown = py::object(shown).release().ptr();
    return py::reinterpret_steal<py::object>(made);
}

}  // namespace te_graph::graphs
