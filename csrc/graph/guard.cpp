#include "graph/guard.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <sstream>

#include "graph/dict_watch.h"

namespace py = pybind11;

namespace te_graph::graph {
namespace {

// The object that a step leads to, borrowed from its container, or nullptr when it is not there.
PyObject* take_step(StepKind kind, PyObject* parent, PyObject* key, Py_ssize_t index) {
    PyObject* found = nullptr;
    switch (kind) {
        case StepKind::kInstanceDict:
            found = PyObject_GenericGetDict(parent, nullptr);
            Py_XDECREF(found);  // the instance holds it
            break;
        case StepKind::kItem:
            found = PyDict_Check(parent) ? PyDict_GetItemWithError(parent, key) : nullptr;
            break;
        case StepKind::kAbsent:
            found = PyDict_Check(parent) && !PyDict_GetItemWithError(parent, key) ? parent : nullptr;
            break;
        case StepKind::kLength:
            found = PyDict_Check(parent) && PyDict_GET_SIZE(parent) == index ? parent : nullptr;
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

bool Guard::Identity::matches(PyObject* found) const {
    if (!address_) return true;
    if (found != address_ || !weak_) return found == address_;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* live = nullptr;
    PyWeakref_GetRef(weak_.ptr(), &live);
    Py_XDECREF(live);  // `found` is held by its container
    return live == found;
#else
    return PyWeakref_GetObject(weak_.ptr()) == found;
#endif
}

void Guard::Identity::release() { weak_.release(); }

Guard::~Guard() {
    if (!Py_IsInitialized()) {
        for (Step& step : steps_) {  // the interpreter is gone, and with it the objects
            step.key.release();
            step.expected.release();
        }
        return;
    }
    const py::gil_scoped_acquire gil;
    steps_.clear();
}

int Guard::add_step(StepKind kind, int parent, py::object key, int64_t index, py::object expected,
                    std::string subject) {
    steps_.push_back({kind, parent, std::move(key), index, Identity(expected), std::move(subject)});
    return static_cast<int>(steps_.size()) - 1;
}

int Guard::add_tensor(int step, const at::Tensor& tensor) {
    steps_[step].tensor = static_cast<int>(tensors_.size());
    tensors_.push_back({step, TensorFacts(tensor), tensor.requires_grad()});
    return steps_[step].tensor;
}

// Items of dictionaries, except those of a function's globals, which training scripts change all the time, and of
// instances where Python keeps their values in the object: attributes then change without a word to who watches.
bool Guard::is_in_watched_dict(const Step& step) const {
    constexpr bool kHasValuesInObjects = PY_VERSION_HEX >= 0x030D0000;
    const bool is_dict =
        step.kind == StepKind::kItem || step.kind == StepKind::kAbsent || step.kind == StepKind::kLength;
    if (!is_dict || step.parent < 0) return is_dict;
    const StepKind parent = steps_[step.parent].kind;
    return parent != StepKind::kAttribute && !(kHasValuesInObjects && parent == StepKind::kInstanceDict);
}

std::string Guard::check(PyObject* root, Tensors& found) const {
    if (!is_as_last_time(root)) {
        forget();
        const uint64_t changes = dict_changes();
        std::vector<PyObject*> tensors(tensors_.size());
        if (std::string change = walk(root, tensors); !change.empty()) return change;
        found_ = std::make_shared<FoundTensors>(std::move(tensors));
        root_ = root;
        changes_ = changes;
    }
    found = found_;
    return {};
}

void Guard::forget() const {
    root_ = nullptr;
    const Tensors last = std::move(found_);  // dropped once this is in order: objects may call back
    found_ = nullptr;
}

bool Guard::is_as_last_time(PyObject* root) const {
    if (root != root_ || changes_ != dict_changes()) return false;
    for (const size_t i : unwatched_) {
        const Step& step = steps_[i];
        PyObject* const parent = step.parent < 0 ? root : reached_[step.parent];
        PyObject* const object = take_step(step.kind, parent, step.key.ptr(), step.index);
        if (!object || object != reached_[i] || !step.expected.matches(object)) return false;
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
        if (!found_->is_unswapped(i) || !is_same(tensors_[i], (*found_)[i], true)) return false;
    }
    return true;
}

std::string Guard::walk(PyObject* root, std::vector<PyObject*>& found) const {
    reached_.assign(steps_.size(), nullptr);
    unwatched_.clear();
    for (size_t i = 0; i < steps_.size(); ++i) {
        const Step& step = steps_[i];
        PyObject* const parent = step.parent < 0 ? root : reached_[step.parent];
        const bool is_watched = is_in_watched_dict(step) && PyDict_Check(parent) && watch_dict(parent);
        if (!is_watched) unwatched_.push_back(i);
        PyObject* const object = take_step(step.kind, parent, step.key.ptr(), step.index);
        reached_[i] = object;
        if (!object)
            return step.subject +
                   (step.kind == StepKind::kLength || step.kind == StepKind::kAbsent ? " changed" : " is gone");
        if (step.tensor >= 0) {
            if (!THPVariable_Check(object)) return step.subject + " is no longer a tensor";
            const at::Tensor& tensor = THPVariable_Unpack(object);
            if (std::string change = compare(tensors_[step.tensor], tensor, true); !change.empty()) {
                return step.subject + change;
            }
            found[step.tensor] = object;
        }
        if (!step.expected.matches(object)) {
            if (PyBool_Check(object)) return step.subject + (object == Py_True ? " is now True" : " is now False");
            return step.subject + " was replaced by another object";
        }
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
    } else if (!facts.is_address_of(*tensor.unsafeGetTensorImpl())) {
        change << " moved to other memory";
    } else if (tensor.strides() != facts.strides()) {
        change << " changed strides from " << facts.strides() << " to " << tensor.strides();
    } else if (!facts.has_bits_of(tensor)) {
        change << " became, or is no longer, a conjugate or negative view";
    } else {
        change << " changed requires_grad from " << (expected.requires_grad ? "True" : "False");
    }
    return change.str();
}

}  // namespace te_graph::graph
