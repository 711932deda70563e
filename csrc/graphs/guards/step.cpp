#include "graphs/guards/step.h"

#include <torch/csrc/autograd/python_variable.h>

#include "graphs/guards/value.h"
#include "graphs/python_reference.h"

namespace py = pybind11;

namespace te_graph::graphs {

PyTypeObject* type_of(PyObject* object) {
    return PyType_Check(object) ? reinterpret_cast<PyTypeObject*>(object) : Py_TYPE(object);
}

unsigned int type_version(PyTypeObject* type) {
    static PyObject* const any_name = PyUnicode_InternFromString("__class__");
    if (type->tp_version_tag == 0 || !PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) {
        _PyType_Lookup(type, any_name);  // which gives it one
    }
    return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
}

const at::Tensor& grad_of(PyObject* tensor) {
    const c10::TensorImpl* const impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
    return impl->grad();
}

namespace {

// The keys of `dict` are those of the tuple, in the order in which it iterates over them.
bool has_keys(PyObject* dict, PyObject* keys) {
    if (PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(keys)) return false;
    Py_ssize_t next = 0;
    return all_of_dict(dict, [&](PyObject* key, PyObject*) {
        return next < PyTuple_GET_SIZE(keys) && is_same_constant(PyTuple_GET_ITEM(keys, next++), key);
    });
}

// How Python's own class reads a container, without code of the class that is derived from it; nullptr for others.
const PySequenceMethods* raw_sequence(PyObject* container) {
    PyTypeObject* type = Py_TYPE(container);
    while (type->tp_base && !PyType_HasFeature(type, Py_TPFLAGS_IMMUTABLETYPE)) type = type->tp_base;
    return type->tp_as_sequence;
}

// Of a class: how many attributes it has of its own. `uncounted`: None, or of a dict a tuple of keys.
Py_ssize_t length_of(PyObject* container, PyObject* uncounted) {
    if (PyType_Check(container)) return PyDict_GET_SIZE(reinterpret_cast<PyTypeObject*>(container)->tp_dict);
    if (PyTuple_Check(uncounted)) {
        if (!PyDict_Check(container)) return -1;
        Py_ssize_t length = PyDict_GET_SIZE(container);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(uncounted); ++i) {
            length -= PyDict_Contains(container, PyTuple_GET_ITEM(uncounted, i)) == 1;
        }
        return length;
    }
    if (PyDict_Check(container)) return PyDict_GET_SIZE(container);
    if (PyList_Check(container)) return PyList_GET_SIZE(container);
    if (PyTuple_Check(container)) return PyTuple_GET_SIZE(container);
    const PySequenceMethods* const raw = raw_sequence(container);
    return raw && raw->sq_length ? raw->sq_length(container) : PyObject_Size(container);
}

PyObject* element_of(PyObject* sequence, Py_ssize_t index) {
    const PySequenceMethods* const raw = raw_sequence(sequence);
    return raw && raw->sq_item ? raw->sq_item(sequence, index) : PySequence_GetItem(sequence, index);
}

// A new reference given back: the parent holds the object. nullptr where it does not, but made it for the caller.
PyObject* held_elsewhere(PyObject* object) {
    const bool is_held = object && Py_REFCNT(object) > 1;
    Py_XDECREF(object);
    return is_held ? object : nullptr;
}

// The name of a function or class where it is kept, nullptr where it is asked for otherwise. Guards compare hundreds of
// them, which getattr() would look up as long as everything else takes together.
PyObject* kept_name_of(PyObject* parent, PyObject* key) {
    static PyObject* const dunder_name = PyUnicode_InternFromString("__name__");
    static PyObject* const of_types = _PyType_Lookup(&PyType_Type, dunder_name);
    if (key != dunder_name) return nullptr;
    if (PyFunction_Check(parent)) return reinterpret_cast<PyFunctionObject*>(parent)->func_name;
    const bool is_kept = PyType_Check(parent) &&
                         PyType_HasFeature(reinterpret_cast<PyTypeObject*>(parent), Py_TPFLAGS_HEAPTYPE) &&
                         Py_TYPE(parent)->tp_getattro == PyType_Type.tp_getattro &&
                         _PyType_Lookup(Py_TYPE(parent), dunder_name) == of_types;
    return is_kept ? reinterpret_cast<PyHeapTypeObject*>(parent)->ht_name : nullptr;
}

// The first object that `parent` refers to, as tp_traverse shows it.
PyObject* referent_of(PyObject* parent) {
    PyObject* found = nullptr;
    const auto first = [](PyObject* object, void* result) {
        *static_cast<PyObject**>(result) = object;
        return 1;
    };
    if (Py_TYPE(parent)->tp_traverse) Py_TYPE(parent)->tp_traverse(parent, first, &found);
    return found;
}

// What a functools.lru_cache keeps, as tp_traverse shows it: where it has a size, each key with its result behind it;
// else first its dictionary, which has the results.
struct CachedResult {
    PyObject* key;
    bool has_size;
    PyObject* before = nullptr;
    PyObject* found = nullptr;

    static int visit(PyObject* object, void* data) {
        auto& self = *static_cast<CachedResult*>(data);
        const bool is_it = self.has_size ? self.before == self.key && !PyType_Check(object) : PyDict_CheckExact(object);
        if (is_it) self.found = object;
        self.before = object;
        return is_it ? 1 : 0;
    }
};

PyObject* cached_result(PyObject* function, PyObject* key, bool has_size) {
    CachedResult cached{key, has_size};
    if (Py_TYPE(function)->tp_traverse) Py_TYPE(function)->tp_traverse(function, CachedResult::visit, &cached);
    if (!cached.found || has_size) return cached.found;
    return PyDict_GetItemWithError(cached.found, key);
}

PyObject* value_of(PyObject* context_variable) {
    PyObject* value = nullptr;
    if (!PyContextVar_CheckExact(context_variable) || PyContextVar_Get(context_variable, nullptr, &value) < 0) {
        return nullptr;
    }
    if (!value) return Py_NotImplemented;
    Py_DECREF(value);  // the context holds it
    return value;
}

PyObject* object_of(PyObject* weak_reference) {
    if (!PyWeakref_CheckRef(weak_reference)) return nullptr;
    PyObject* const live = live_object(weak_reference);
    return live ? live : Py_None;
}

// Without what the user's __getattr__ would make up.
bool has_attribute(PyObject* object, PyObject* name) {
    PyObject* const found = PyObject_GenericGetAttr(object, name);
    if (!found) PyErr_Clear();
    Py_XDECREF(found);
    return found != nullptr;
}

// The class below ours, where `object` is a graphed module.
PyObject* class_of(PyObject* object) {
    static PyObject* const below_ours = PyUnicode_InternFromString("_te_graph_base");
    PyTypeObject* const type = type_of(object);
    // Ours are made at run time. Those of Python's own have no dictionary here from 3.12 on.
    if (!PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) return reinterpret_cast<PyObject*>(type);
    _PyType_Lookup(type, below_ours);  // gives it a version if it has none
    PyObject* const below = PyDict_GetItemWithError(type->tp_dict, below_ours);
    return below ? below : reinterpret_cast<PyObject*>(type);
}

PyObject* code_of(PyObject* weak_reference) {
    PyObject* const function = object_of(weak_reference);
    return function && PyFunction_Check(function) ? PyFunction_GET_CODE(function) : Py_NotImplemented;
}

}  // namespace

PyObject* take_step(StepKind kind, PyObject* parent, PyObject* key, Py_ssize_t index) {
    PyObject* found = nullptr;
    switch (kind) {
        case StepKind::kInstanceDict:
            found = PyObject_GenericGetDict(parent, nullptr);
            Py_XDECREF(found);  // the instance holds it
            break;
        case StepKind::kItem:
        case StepKind::kItemOf:
            found = PyDict_Check(parent) ? PyDict_GetItemWithError(parent, key) : nullptr;
            break;
        case StepKind::kAbsent:
            found = PyDict_Check(parent) && !PyDict_GetItemWithError(parent, key) ? parent : nullptr;
            break;
        case StepKind::kLength:
            found = length_of(parent, key) == index ? parent : nullptr;
            break;
        case StepKind::kKeys:
            found = PyDict_Check(parent) && has_keys(parent, key) ? parent : nullptr;
            break;
        case StepKind::kPosition:
            if (PyList_Check(parent) && index < PyList_GET_SIZE(parent)) found = PyList_GET_ITEM(parent, index);
            if (PyTuple_Check(parent) && index < PyTuple_GET_SIZE(parent)) found = PyTuple_GET_ITEM(parent, index);
            break;
        case StepKind::kCell:
            found = PyCell_Check(parent) ? PyCell_GET(parent) : nullptr;
            break;
        case StepKind::kAttribute:
            found = kept_name_of(parent, key);
            if (!found) found = held_elsewhere(PyObject_GetAttr(parent, key));
            break;
        case StepKind::kGrad:
            if (THPVariable_Check(parent)) found = grad_of(parent).defined() ? parent : Py_None;
            break;
        case StepKind::kKnown:  // see Guard::take()
            break;
        case StepKind::kType:
            found = reinterpret_cast<PyObject*>(Py_TYPE(parent));
            break;
        case StepKind::kTypeItem:
            if (PyType_Check(parent)) found = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(parent), key);
            break;
        case StepKind::kTypeAbsent:
            if (!PyType_Check(parent)) break;
            found = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(parent), key) ? nullptr : parent;
            break;
        case StepKind::kTypeVersion:
            if (!PyType_Check(parent)) break;
            found = type_version(reinterpret_cast<PyTypeObject*>(parent)) == static_cast<unsigned int>(index) ? parent
                                                                                                              : nullptr;
            break;
        case StepKind::kNoAttribute:
            found = has_attribute(parent, key) ? nullptr : parent;
            break;
        case StepKind::kClass:
            found = class_of(parent);
            break;
        case StepKind::kMember:
            found = _PyType_Lookup(reinterpret_cast<PyTypeObject*>(parent), key);
            if (!found) found = Py_NotImplemented;
            break;
        case StepKind::kCode:
            found = code_of(key);
            break;
        case StepKind::kContents:
            found = parent;
            break;
        case StepKind::kElement:
            found = held_elsewhere(element_of(parent, index));
            break;
        case StepKind::kReferent:
            found = referent_of(parent);
            break;
        case StepKind::kContextVar:
            found = value_of(parent);
            break;
        case StepKind::kWeakReference:
            found = object_of(parent);
            break;
        case StepKind::kCached:
            found = cached_result(parent, key, index == 1);
            break;
        case StepKind::kConstant:
            found = key;
            break;
        case StepKind::kNever:
            break;
    }
    if (!found) PyErr_Clear();
    return found;
}

}  // namespace te_graph::graphs
