#include "graphs/guards/value.h"

#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "graphs/python_reference.h"

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

constexpr int kMaxNested = 32;
constexpr Py_ssize_t kMaxBytes = 1 << 20;  // of a buffer, which is compared at each call: 30 µs

struct KeyedType {
    PyObject* key;
    bool is_mutable;
};

// Whether instances of `type`, derived from `base`, hold nothing besides but a dictionary and a list of weak
// references.
bool adds_no_fields(PyTypeObject* type, PyTypeObject* base) {
#ifdef Py_TPFLAGS_MANAGED_DICT
    const bool is_in_front = type->tp_flags & Py_TPFLAGS_MANAGED_DICT;  // of the object, where Python keeps it
#else
    constexpr bool is_in_front = false;
#endif
    const bool has_dict = type->tp_dictoffset && !is_in_front && !base->tp_dictoffset;
    const bool has_list = type->tp_weaklistoffset > 0 && !base->tp_weaklistoffset;
    const auto added = static_cast<Py_ssize_t>(sizeof(PyObject*)) * (has_dict + has_list);
    return type->tp_basicsize == base->tp_basicsize + added && type->tp_itemsize == base->tp_itemsize;
}

// Of the process, like the types, which are kept for good.
std::unordered_map<PyTypeObject*, KeyedType>& keyed_types() {
    static std::unordered_map<PyTypeObject*, KeyedType> types;
    return types;
}

// How instances of `type` are compared: as those of the first of its bases that is known and cannot change.
const KeyedType* keyed_type(PyTypeObject* type) {
    const auto known = keyed_types().find(type);
    if (known != keyed_types().end()) return &known->second;
    for (Py_ssize_t i = 1; type->tp_mro && i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
        auto* const base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
        const auto found = keyed_types().find(base);
        if (found == keyed_types().end()) continue;
        return found->second.is_mutable || !adds_no_fields(type, base) ? nullptr : &found->second;
    }
    return nullptr;
}

// Kept for good.
PyTypeObject* class_of_enums() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<PyTypeObject*> type;
    const auto find = [] {
        return reinterpret_cast<PyTypeObject*>(
            py::object(py::module_::import("enum").attr("EnumMeta")).release().ptr());
    };
    return type.call_once_and_store_result(find).get_stored();
}

bool is_constant(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
           PyUnicode_CheckExact(object) || PyBytes_CheckExact(object) || PyComplex_CheckExact(object) ||
           object == Py_Ellipsis || object == Py_NotImplemented || THPDtype_Check(object) || THPDevice_Check(object) ||
           THPLayout_Check(object) || THPMemoryFormat_Check(object) ||
           PyType_IsSubtype(Py_TYPE(type), class_of_enums());
}

// What was put on an object of a class that gives it a dictionary of attributes, which are no part of what it holds.
bool has_attributes(PyObject* object) {
    PyObject* const* const dict = _PyObject_GetDictPtr(object);
    return dict && *dict && PyDict_GET_SIZE(*dict) > 0;
}

bool is_same_double(double a, double b) {
    return (a == b && std::signbit(a) == std::signbit(b)) || (std::isnan(a) && std::isnan(b));
}

template <typename Visit>
bool all_of_sequence(PyObject* sequence, Visit visit) {
    const bool is_list = PyList_Check(sequence);
    for (Py_ssize_t i = 0; i < Py_SIZE(sequence); ++i) {
        PyObject* const item = is_list ? PyList_GET_ITEM(sequence, i) : PyTuple_GET_ITEM(sequence, i);
        const auto held = py::reinterpret_borrow<py::object>(item);
        if (!visit(item)) return false;
    }
    return true;
}

template <typename Visit>
bool all_of_set(PyObject* set, Visit visit) {
    const auto members = py::reinterpret_steal<py::object>(PySet_Type.tp_iter(set));  // of derived classes, too
    while (const auto member = py::reinterpret_steal<py::object>(members ? PyIter_Next(members.ptr()) : nullptr)) {
        if (!visit(member.ptr())) return false;
    }
    const bool is_done = members && !PyErr_Occurred();
    PyErr_Clear();
    return is_done;
}

// What an object shows of its memory, read only; released at once, since it cannot be resized meanwhile.
class Buffer {
public:
    explicit Buffer(PyObject* object) {
        is_there_ = PyObject_CheckBuffer(object) && PyObject_GetBuffer(object, &view_, PyBUF_FULL_RO) == 0;
        if (PyErr_Occurred()) PyErr_Clear();
    }
    ~Buffer() {
        if (is_there_) PyBuffer_Release(&view_);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    Py_ssize_t size() const { return view_.len; }
    // Of plain numbers: neither references to objects nor addresses, behind which something else may change.
    bool is_comparable() const {
        return is_there_ && !view_.suboffsets && !(view_.format && names_pointers(view_.format));
    }
    // Everything but the elements.
    std::string layout() const {
        std::string text = view_.format ? view_.format : "B";
        for (const Py_ssize_t* sizes : {view_.shape, view_.strides}) {  // ctypes gives no strides
            for (int i = 0; sizes && i < view_.ndim; ++i) text += ' ' + std::to_string(sizes[i]);
        }
        return text + '\n';
    }
    std::string elements() const {
        std::string copy(static_cast<size_t>(view_.len), '\0');
        return PyBuffer_ToContiguous(copy.data(), &view_, view_.len, 'C') == 0 ? copy : std::string();
    }
    bool is_equal(const std::string& expected) const {
        const std::string own = layout();
        if (own.size() + static_cast<size_t>(view_.len) != expected.size()) return false;
        if (expected.compare(0, own.size(), own) != 0) return false;
        if (!PyBuffer_IsContiguous(&view_, 'C'))
            return expected.compare(own.size(), std::string::npos, elements()) == 0;
        return std::memcmp(expected.data() + own.size(), view_.buf, static_cast<size_t>(view_.len)) == 0;
    }

private:
    static bool names_pointers(const char* format) {
        bool is_name = false;  // of a field, between colons
        for (; *format; ++format) {
            if (*format == ':') is_name = !is_name;
            if (is_name) continue;
            if (*format == 'Z' && format[1] && std::strchr("fdg", format[1])) {  // complex numbers; else text elsewhere
                ++format;
            } else if (std::strchr("OPXZz&", *format)) {
                return true;
            }
        }
        return false;
    }

    mutable Py_buffer view_{};
    bool is_there_;
};

}  // namespace

bool is_same_constant(PyObject* expected, PyObject* found) {
    if (expected == found) return true;
    if (Py_TYPE(expected) != Py_TYPE(found)) return false;
    if (PyFloat_CheckExact(expected)) return is_same_double(PyFloat_AS_DOUBLE(expected), PyFloat_AS_DOUBLE(found));
    if (PyComplex_CheckExact(expected)) {
        const Py_complex a = PyComplex_AsCComplex(expected), b = PyComplex_AsCComplex(found);
        return is_same_double(a.real, b.real) && is_same_double(a.imag, b.imag);
    }
    if (!PyLong_CheckExact(expected) && !PyUnicode_CheckExact(expected) && !PyBytes_CheckExact(expected) &&
        !THPDevice_Check(expected)) {
        return false;  // there is one object of each
    }
    const int equal = PyObject_RichCompareBool(expected, found, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal > 0;
}

bool all_of_dict(PyObject* dict, const std::function<bool(PyObject*, PyObject*)>& visit) {
    const Py_ssize_t size = PyDict_GET_SIZE(dict);
    if (PyODict_Check(dict)) {  // it has an order of its own
        const auto keys = py::reinterpret_steal<py::object>(PyODict_Type.tp_iter(dict));
        while (const auto key = py::reinterpret_steal<py::object>(keys ? PyIter_Next(keys.ptr()) : nullptr)) {
            const auto value = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(dict, key.ptr()));
            if (!value || !visit(key.ptr(), value.ptr()) || PyDict_GET_SIZE(dict) != size) return false;
        }
        const bool is_done = keys && !PyErr_Occurred();
        PyErr_Clear();
        return is_done;
    }
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
        const auto held_key = py::reinterpret_borrow<py::object>(key);
        const auto held_value = py::reinterpret_borrow<py::object>(value);
        if (!visit(key, value) || PyDict_GET_SIZE(dict) != size) return false;
    }
    return true;
}

void register_value_type(const py::object& type, const py::object& key, bool is_mutable) {
    keyed_types()[reinterpret_cast<PyTypeObject*>(py::object(type).release().ptr())] =
        KeyedType{py::object(key).release().ptr(), is_mutable};
}

Value::Value(Kind kind, PyObject* object) : kind_(kind), type_(Py_TYPE(object)) { Py_INCREF(type_); }

Value::~Value() {
    if (!Py_IsInitialized()) return;  // the interpreter is gone, and with it the objects
    const py::gil_scoped_acquire gil;
    Py_DECREF(type_);
    Py_XDECREF(object_);
    for (const Item& item : items_) Py_XDECREF(item.constant);
}

std::unique_ptr<Value> Value::of(PyObject* object, int depth) {
    if (depth > kMaxNested) return nullptr;
    if (is_constant(object)) {
        auto value = std::unique_ptr<Value>(new Value(Kind::kConstant, object));
        value->object_ = Py_NewRef(object);
        return value;
    }
    // A named tuple is its items; another subclass may have attributes besides. From the snapshot of a container
    // nothing leads to those of a member that is there later, so that members of derived classes have none.
    const bool is_tuple = PyTuple_Check(object) && Py_TYPE(object)->tp_dictoffset == 0;
    if (PyList_CheckExact(object) || is_tuple) return of_sequence(object, depth);
    if (PyDict_CheckExact(object) || PyODict_CheckExact(object)) {
        return has_attributes(object) ? nullptr : of_dict(object, depth);
    }
    if (PyAnySet_Check(object)) return depth == 0 || PyAnySet_CheckExact(object) ? of_set(object) : nullptr;
    auto keyed = of_keyed(object, depth);
    return keyed || PyBytes_Check(object) ? std::move(keyed) : of_buffer(object);
}

std::unique_ptr<Value> Value::of_buffer(PyObject* object) {
    const Buffer buffer(object);
    if (!buffer.is_comparable() || buffer.size() > kMaxBytes) return nullptr;
    auto value = std::unique_ptr<Value>(new Value(Kind::kBuffer, object));
    value->bytes_ = buffer.layout() + buffer.elements();
    value->is_mutable_ = true;
    return value;
}

bool Value::add(PyObject* object, int depth) {
    if (is_constant(object)) {
        items_.push_back({Py_NewRef(object), nullptr});
        return true;
    }
    std::unique_ptr<Value> nest = of(object, depth + 1);
    if (!nest) return false;
    holds_mutable_ |= nest->is_mutable_;
    is_mutable_ |= nest->is_mutable_;
    holds_objects_ |= nest->holds_objects_;
    items_.push_back({nullptr, std::move(nest)});
    return true;
}

std::unique_ptr<Value> Value::of_sequence(PyObject* object, int depth) {
    auto value = std::unique_ptr<Value>(new Value(Kind::kSequence, object));
    value->is_mutable_ = PyList_Check(object);
    if (!all_of_sequence(object, [&](PyObject* item) { return value->add(item, depth); })) return nullptr;
    value->keep_if_frozen(object);
    return value;
}

// What holds nothing but constants, however deep, stays what it is and may be kept: found again, it need not be looked
// into.
void Value::keep_if_frozen(PyObject* object) {
    if (!is_mutable_ && !holds_objects_) object_ = Py_NewRef(object);
}

std::unique_ptr<Value> Value::of_dict(PyObject* object, int depth) {
    auto value = std::unique_ptr<Value>(new Value(Kind::kDict, object));
    value->is_mutable_ = true;
    const auto add = [&](PyObject* key, PyObject* item) { return value->add(key, depth) && value->add(item, depth); };
    return all_of_dict(object, add) ? std::move(value) : nullptr;
}

std::unique_ptr<Value> Value::of_set(PyObject* object) {
    auto value = std::unique_ptr<Value>(new Value(Kind::kSet, object));
    value->is_mutable_ = PySet_Check(object);
    const auto add = [&](PyObject* member) {
        value->add_member(member);
        return true;
    };
    if (!all_of_set(object, add)) return nullptr;
    value->keep_if_frozen(object);
    return value;
}

std::unique_ptr<Value> Value::of_keys(PyObject* dict) {
    auto value = std::unique_ptr<Value>(new Value(Kind::kKeys, dict));
    value->is_mutable_ = true;
    const auto add = [&](PyObject* key, PyObject*) {
        value->add_member(key);
        return true;
    };
    return all_of_dict(dict, add) ? std::move(value) : nullptr;
}

// Constants by value, other objects by identity; owned, where they have no weak references.
void Value::add_member(PyObject* object) {
    if (add(object, 0)) return;
    holds_objects_ = true;
    PyObject* const weak = PyWeakref_NewRef(object, nullptr);
    if (!weak) {
        PyErr_Clear();
        items_.push_back({Py_NewRef(object), nullptr});
        return;
    }
    auto nest = std::unique_ptr<Value>(new Value(Kind::kWeak, object));
    nest->object_ = weak;
    items_.push_back({nullptr, std::move(nest)});
}

std::unique_ptr<Value> Value::of_keyed(PyObject* object, int depth) {
    const KeyedType* const known = keyed_type(Py_TYPE(object));
    if (!known) return nullptr;
    const auto key = py::reinterpret_steal<py::object>(PyObject_CallOneArg(known->key, object));
    if (!key) PyErr_Clear();
    if (!key || key.is_none()) return nullptr;
    auto value = std::unique_ptr<Value>(new Value(Kind::kKeyed, object));
    value->key_ = known->key;
    if (!value->add(key.ptr(), depth)) return nullptr;
    value->is_mutable_ |= known->is_mutable;  // or what it holds is
    value->holds_mutable_ |= known->is_mutable;
    if (!value->is_mutable_) value->object_ = Py_NewRef(object);
    return value;
}

int Value::visit(visitproc visit, void* arg) const {
    Py_VISIT(type_);
    Py_VISIT(object_);
    for (const Item& item : items_) {
        Py_VISIT(item.constant);
        if (const int stop = item.nest ? item.nest->visit(visit, arg) : 0) return stop;
    }
    return 0;
}

bool Value::matches(const Item& item, PyObject* found) {
    return item.nest ? item.nest->matches(found) : is_same_constant(item.constant, found);
}

bool Value::matches(PyObject* found) const {
    if (Py_TYPE(found) != type_) return false;
    if (found == object_) return true;  // a weak reference is of another type than what it refers to
    size_t next = 0;
    const auto is_next = [&](PyObject* item) { return next < items_.size() && matches(items_[next++], item); };
    switch (kind_) {
        case Kind::kConstant:
            return is_same_constant(object_, found);
        case Kind::kWeak:
            return live_object(object_) == found;
        case Kind::kSequence:
            return static_cast<size_t>(Py_SIZE(found)) == items_.size() && all_of_sequence(found, is_next);
        case Kind::kSet:
            return static_cast<size_t>(PySet_GET_SIZE(found)) == items_.size() &&
                   (items_.empty() || all_of_set(found, is_next));
        case Kind::kDict:
            return static_cast<size_t>(PyDict_GET_SIZE(found)) * 2 == items_.size() && !has_attributes(found) &&
                   all_of_dict(found, [&](PyObject* key, PyObject* value) { return is_next(key) && is_next(value); });
        case Kind::kKeys:
            return static_cast<size_t>(PyDict_GET_SIZE(found)) == items_.size() &&
                   all_of_dict(found, [&](PyObject* key, PyObject*) { return is_next(key); });
        case Kind::kBuffer: {
            const Buffer buffer(found);
            return buffer.is_comparable() && buffer.is_equal(bytes_);
        }
        case Kind::kKeyed:
            break;
    }
    const auto key = py::reinterpret_steal<py::object>(PyObject_CallOneArg(key_, found));
    if (!key) PyErr_Clear();
    return key && matches(items_[0], key.ptr());
}

std::string Value::difference(const Item& item, const std::string& name, PyObject* found) {
    if (item.nest) return item.nest->difference(name, found);
    return name + " changed from " + shown(item.constant) + " to " + shown(found);
}

std::string Value::difference(const std::string& name, PyObject* found) const {
    if (Py_TYPE(found) != type_) {
        if (kind_ == Kind::kConstant) return name + " changed from " + shown(object_) + " to " + shown(found);
        return name + " changed from a " + type_->tp_name + " to a " + Py_TYPE(found)->tp_name;
    }
    std::string change;
    size_t next = 0;
    if (kind_ == Kind::kSequence && static_cast<size_t>(Py_SIZE(found)) == items_.size()) {
        all_of_sequence(found, [&](PyObject* item) {
            const Item& expected = items_[next];
            if (!matches(expected, item)) change = difference(expected, name + "[" + std::to_string(next) + "]", item);
            ++next;
            return change.empty() && next < items_.size();
        });
    } else if (kind_ == Kind::kDict && static_cast<size_t>(PyDict_GET_SIZE(found)) * 2 == items_.size()) {
        all_of_dict(found, [&](PyObject* key, PyObject* item) {
            if (!matches(items_[next], key)) return false;
            const Item& expected = items_[next + 1];
            if (!matches(expected, item)) change = difference(expected, name + "[" + shown(key) + "]", item);
            next += 2;
            return change.empty() && next < items_.size();
        });
    } else if (kind_ == Kind::kConstant || (kind_ == Kind::kKeyed && object_)) {
        change = name + " changed from " + shown(object_) + " to " + shown(found);
    }
    if (!change.empty()) return change;
    if (kind_ == Kind::kDict && has_attributes(found)) return name + " has attributes now";
    if (kind_ == Kind::kSequence) return "length of " + name + " changed";
    if (kind_ == Kind::kDict || kind_ == Kind::kKeys) return "keys of " + name + " changed";
    return name + " changed";
}

std::string shown(PyObject* object) {
    constexpr size_t kMaxLength = 80;
    if (THPVariable_Check(object)) return "a tensor";
    const py::object text = py::reinterpret_steal<py::object>(PyObject_Repr(object));
    if (!text) {
        PyErr_Clear();
        return Py_TYPE(object)->tp_name;
    }
    const std::string whole = py::str(text);
    return whole.size() <= kMaxLength ? whole : Py_TYPE(object)->tp_name;
}

}  // namespace te_graph::graphs
