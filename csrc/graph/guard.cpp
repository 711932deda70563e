#include "graph/guard.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "graph/dict_watch.h"

namespace py = pybind11;

namespace te_graph::graph {
namespace {

bool is_equal(PyObject* expected, PyObject* found);

bool are_equal_sequences(PyObject* expected, PyObject* found) {
    if (PySequence_Fast_GET_SIZE(expected) != PySequence_Fast_GET_SIZE(found)) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(expected); ++i) {
        if (i >= PySequence_Fast_GET_SIZE(found)) return false;  // a comparison may run code
        if (!is_equal(PySequence_Fast_GET_ITEM(expected, i), PySequence_Fast_GET_ITEM(found, i))) return false;
    }
    return true;
}

bool are_equal_dicts(PyObject* expected, PyObject* found) {
    if (PyDict_GET_SIZE(expected) != PyDict_GET_SIZE(found)) return false;
    PyObject *key = nullptr, *value = nullptr, *found_key = nullptr, *found_value = nullptr;
    Py_ssize_t position = 0, found_position = 0;
    while (PyDict_Next(expected, &position, &key, &value)) {
        if (!PyDict_Next(found, &found_position, &found_key, &found_value)) return false;
        if (!is_equal(key, found_key) || !is_equal(value, found_value)) return false;
    }
    return true;
}

// Equal in type and value; dictionaries also in order; sets are equal whether frozen or not, NaN is equal to itself, 0.0 is not -0.0.
bool is_equal(PyObject* expected, PyObject* found) {
    if (expected == found) return true;
    if (Py_TYPE(expected) != Py_TYPE(found) && !(PyAnySet_Check(expected) && PyAnySet_Check(found))) return false;
    if (PyTuple_Check(expected) || PyList_Check(expected)) return are_equal_sequences(expected, found);
    if (PyDict_CheckExact(expected)) return are_equal_dicts(expected, found);
    if (PyFloat_CheckExact(expected)) {
        const double a = PyFloat_AS_DOUBLE(expected), b = PyFloat_AS_DOUBLE(found);
        return (a == b && std::signbit(a) == std::signbit(b)) || (std::isnan(a) && std::isnan(b));
    }
    const int equal = PyObject_RichCompareBool(expected, found, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal > 0;
}

bool has_keys(PyObject* dict, PyObject* keys) {
    if (PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(keys)) return false;
    PyObject* key = nullptr;
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; PyDict_Next(dict, &position, &key, nullptr); ++i) {
        if (!is_equal(PyTuple_GET_ITEM(keys, i), key)) return false;
    }
    return true;
}

Py_ssize_t length_of(PyObject* container) {
    if (PyDict_Check(container)) return PyDict_GET_SIZE(container);
    if (PyList_Check(container)) return PyList_GET_SIZE(container);
    return PyTuple_Check(container) ? PyTuple_GET_SIZE(container) : -1;
}

const at::Tensor& grad_of(PyObject* tensor) {
    const c10::TensorImpl* const impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
    return impl->grad();
}

std::string shown(PyObject* object) {
    constexpr size_t kMost = 80;
    if (THPVariable_Check(object)) return "a tensor";
    const py::object text = py::reinterpret_steal<py::object>(PyObject_Repr(object));
    if (!text) {
        PyErr_Clear();
        return Py_TYPE(object)->tp_name;
    }
    const std::string whole = py::str(text);
    return whole.size() <= kMost ? whole : Py_TYPE(object)->tp_name;
}

// The object that a step leads to, borrowed from its container, or nullptr when it is not there.
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
            found = length_of(parent) == index ? parent : nullptr;
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
            found = PyObject_GetAttr(parent, key);
            Py_XDECREF(found);  // the parent holds it
            break;
        case StepKind::kGrad:
            if (THPVariable_Check(parent)) found = grad_of(parent).defined() ? parent : Py_None;
            break;
        case StepKind::kContents:
            found = parent;
            break;
        case StepKind::kKnown:  // see Guard::take()
            break;
    }
    if (!found) PyErr_Clear();
    return found;
}

}  // namespace

Guard::Identity::Identity(const py::object& object) {
    if (object.is_none()) return;
    address_ = object.ptr();
    weak_ = py::reinterpret_steal<py::object>(PyWeakref_NewRef(object.ptr(), nullptr));
    if (!weak_) PyErr_Clear();
}

bool Guard::Identity::matches(PyObject* found) const { return !address_ || (found == address_ && live() == found); }

PyObject* Guard::Identity::live() const {
    if (!weak_) return address_;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* found = nullptr;
    PyWeakref_GetRef(weak_.ptr(), &found);
    Py_XDECREF(found);  // somebody else holds it
    return found;
#else
    PyObject* const found = PyWeakref_GetObject(weak_.ptr());
    return found == Py_None ? nullptr : found;
#endif
}

void Guard::Identity::release() { weak_.release(); }

Guard::~Guard() {
    if (!Py_IsInitialized()) {
        for (Step& step : steps_) {  // the interpreter is gone, and with it the objects
            step.key.release();
            step.expected.release();
            step.value.release();
            step.type.release();
        }
        return;
    }
    const py::gil_scoped_acquire gil;
    steps_.clear();
}

int Guard::add_step(StepKind kind, int parent, py::object key, int64_t index, py::object expected, std::string subject,
                    bool is_fleeting) {
    steps_.push_back({kind, parent, std::move(key), index, Identity(expected), std::move(subject), is_fleeting});
    if (is_attribute(steps_.back())) name_attribute(steps_.back().key.ptr());
    return static_cast<int>(steps_.size()) - 1;
}

int Guard::add_tensor(int step, const at::Tensor& tensor, bool is_used, bool is_written) {
    steps_[step].tensor = static_cast<int>(tensors_.size());
    tensors_.push_back({step, TensorFacts(tensor), tensor.requires_grad(), is_used, is_written});
    return steps_[step].tensor;
}

// Items of dictionaries, except those of a function's globals, which training scripts change all the time, and of
// instances where Python keeps their values in the object: attributes then change without a word to who watches.
bool Guard::is_in_watched_dict(const Step& step) const {
    constexpr bool kHasValuesInObjects = PY_VERSION_HEX >= 0x030D0000;
    const bool is_dict = step.kind == StepKind::kItem || step.kind == StepKind::kAbsent ||
                         step.kind == StepKind::kLength || step.kind == StepKind::kKeys ||
                         step.kind == StepKind::kItemOf || step.kind == StepKind::kContents;
    if (!is_dict || step.is_fleeting) return false;
    if (step.parent < 0) return true;
    const StepKind parent = steps_[step.parent].kind;
    return parent != StepKind::kAttribute && !(kHasValuesInObjects && parent == StepKind::kInstanceDict);
}

// One attribute of an object, by name: what happens to the others does not matter.
bool Guard::is_attribute(const Step& step) const {
    return (step.kind == StepKind::kItem || step.kind == StepKind::kAbsent) && step.parent >= 0 &&
           steps_[step.parent].kind == StepKind::kInstanceDict && PyUnicode_CheckExact(step.key.ptr());
}

bool Guard::watch(const Step& step, PyObject* parent) const {
    if (!is_in_watched_dict(step) || !PyDict_Check(parent)) return false;
    // An OrderedDict keeps its order elsewhere.
    if (step.kind == StepKind::kContents && !PyDict_CheckExact(parent)) return false;
    return is_attribute(step) ? watch_attributes(parent) : watch_dict(parent);
}

std::string Guard::check(PyObject* root, Tensors& found) const {
    if (!is_as_last_time(root)) {
        forget();
        const uint64_t changes = dict_changes();
        std::vector<PyObject*> tensors(tensors_.size());
        if (std::string change = walk(root, &tensors); !change.empty()) return change;
        found_ = std::make_shared<FoundTensors>(std::move(tensors));
        root_ = root;
        changes_ = changes;
    }
    found = found_;
    return {};
}

std::string Guard::check_in_passing(PyObject* root) const {
    if (is_as_before(root)) return {};
    root_ = nullptr;
    const uint64_t changes = dict_changes();
    if (std::string change = walk(root, nullptr); !change.empty()) return change;
    note_what_is_watched();
    root_ = root;
    changes_ = changes;
    return {};
}

void Guard::bump_versions() const {
    for (const ExpectedTensor& expected : tensors_) {
        if (!expected.is_written) continue;
        PyObject* const object = reached_[expected.step];
        const at::Tensor& tensor =
            steps_[expected.step].kind == StepKind::kGrad ? grad_of(object) : THPVariable_Unpack(object);
        if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
}

void Guard::forget() const {
    root_ = nullptr;
    const Tensors last = std::move(found_);  // dropped once this is in order: objects may call back
    found_ = nullptr;
}

PyObject* Guard::take(const Step& step, PyObject* parent) const {
    if (step.kind == StepKind::kKnown) return step.expected.live();
    PyObject* const key = step.kind == StepKind::kItemOf ? reached_[step.index] : step.key.ptr();
    return take_step(step.kind, parent, key, step.index);
}

bool Guard::is_expected(const Step& step, PyObject* object) const {
    if (step.same_as >= 0 && object != reached_[step.same_as]) return false;
    if (step.value && !is_equal(step.value.ptr(), object)) return false;
    return step.type.matches(reinterpret_cast<PyObject*>(Py_TYPE(object))) && step.expected.matches(object);
}

bool Guard::has_tensor(const Step& step, PyObject* parent, PyObject* object) const {
    const ExpectedTensor& expected = tensors_[step.tensor];
    if (step.kind == StepKind::kGrad) return object != Py_None && is_same(expected, grad_of(parent), true);
    return THPVariable_Check(object) && is_same(expected, THPVariable_Unpack(object), true);
}

bool Guard::is_as_last_time(PyObject* root) const {
    if (root != root_ || changes_ != dict_changes()) return false;
    for (const size_t i : unwatched_) {
        const Step& step = steps_[i];
        PyObject* const object = take(step, step.parent < 0 ? root : reached_[step.parent]);
        if (!object || object != reached_[i] || !is_expected(step, object)) return false;
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
        if (!found_->is_unswapped(i) || !is_same(tensors_[i], (*found_)[i], true)) return false;
    }
    return true;
}

// As the last check in passing found it, though some objects may be others. Those below which nothing is taken again
// must not be.
bool Guard::is_as_before(PyObject* root) const {
    if (!root_ || changes_ != dict_changes()) return false;
    for (const size_t i : unwatched_) {
        const Step& step = steps_[i];
        PyObject* const parent = step.parent < 0 ? root : reached_[step.parent];
        PyObject* const object = take(step, parent);
        if (!object || (object != reached_[i] && leads_to_watched_[i]) || !is_expected(step, object)) return false;
        reached_[i] = object;
        if (step.tensor >= 0 && !has_tensor(step, parent, object)) return false;
    }
    return std::all_of(watched_tensors_.begin(), watched_tensors_.end(),
                       [&](size_t i) { return has_tensor(steps_[i], reached_[steps_[i].parent], reached_[i]); });
}

void Guard::note_what_is_watched() const {
    std::vector<char> is_taken(steps_.size(), 0);
    for (const size_t i : unwatched_) is_taken[i] = 1;
    leads_to_watched_.assign(steps_.size(), 0);
    watched_tensors_.clear();
    for (size_t i = 0; i < steps_.size(); ++i) {
        if (is_taken[i]) continue;
        const Step& step = steps_[i];
        if (step.tensor >= 0) watched_tensors_.push_back(i);
        if (step.parent >= 0) leads_to_watched_[step.parent] = 1;
        if (step.kind == StepKind::kItemOf) leads_to_watched_[step.index] = 1;
        if (step.same_as >= 0) leads_to_watched_[step.same_as] = 1;
    }
}

std::string Guard::difference(const Step& step, PyObject* object) const {
    if (step.value) {
        const bool is_long = step.kind == StepKind::kGrad || PyAnySet_Check(step.value.ptr());
        if (is_long) return step.subject + " changed from " + shown(step.value.ptr());
        return step.subject + " changed from " + shown(step.value.ptr()) + " to " + shown(object);
    }
    if (PyBool_Check(object)) return step.subject + (object == Py_True ? " is now True" : " is now False");
    return step.subject + " was replaced by another object";
}

std::string Guard::walk(PyObject* root, std::vector<PyObject*>* found) const {
    reached_.assign(steps_.size(), nullptr);
    unwatched_.clear();
    for (size_t i = 0; i < steps_.size(); ++i) {
        const Step& step = steps_[i];
        PyObject* const parent = step.parent < 0 ? root : reached_[step.parent];
        if (!watch(step, parent)) unwatched_.push_back(i);
        PyObject* const object = take(step, parent);
        reached_[i] = object;
        if (!object) {
            const bool is_count =
                step.kind == StepKind::kLength || step.kind == StepKind::kAbsent || step.kind == StepKind::kKeys;
            return step.subject + (is_count ? " changed" : " is gone");
        }
        if (step.tensor >= 0) {
            const bool is_grad = step.kind == StepKind::kGrad;
            if (is_grad ? object == Py_None : !THPVariable_Check(object)) {
                return step.subject + " is no longer a tensor";
            }
            const at::Tensor& tensor = is_grad ? grad_of(parent) : THPVariable_Unpack(object);
            if (std::string change = compare(tensors_[step.tensor], tensor, true); !change.empty()) {
                return step.subject + change;
            }
            if (found) (*found)[step.tensor] = object;
        }
        if (!is_expected(step, object)) return difference(step, object);
    }
    return {};
}

std::string Guard::check_tensors(const FoundTensors& found) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
        if (!found.is_unswapped(i)) return tensor_name(i) + " was swapped with another tensor";
        if (is_same(tensors_[i], found[i], false)) continue;
        if (std::string change = compare(tensors_[i], found[i], false); !change.empty()) return tensor_name(i) + change;
    }
    return {};
}

std::string Guard::compare(const ExpectedTensor& expected, const at::Tensor& tensor, bool compare_requires_grad) {
    // On every call of every tensor: no message, and no stream to build one, unless something differs.
    if (is_same(expected, tensor, compare_requires_grad)) return {};
    const TensorFacts& facts = expected.facts;
    std::ostringstream change;
    if (tensor.scalar_type() != facts.dtype()) {
        change << " changed dtype from " << facts.dtype() << " to " << tensor.scalar_type();
    } else if (tensor.sizes() != facts.sizes()) {
        change << " changed shape from " << facts.sizes() << " to " << tensor.sizes();
    } else if (tensor.device() != facts.device()) {
        change << " changed device from " << facts.device() << " to " << tensor.device();
    } else if (expected.is_used && !facts.is_address_of(*tensor.unsafeGetTensorImpl())) {
        change << " moved to other memory";
    } else if (expected.is_used && tensor.strides() != facts.strides()) {
        change << " changed strides from " << facts.strides() << " to " << tensor.strides();
    } else if (expected.is_used && !facts.has_bits_of(tensor)) {
        change << " became, or is no longer, a conjugate or negative view";
    } else {
        change << " changed requires_grad from " << (expected.requires_grad ? "True" : "False");
    }
    return change.str();
}

}  // namespace te_graph::graph
