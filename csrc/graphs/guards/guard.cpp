#include "graphs/guards/guard.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <sstream>

#include "common/dtype_name.h"
#include "graphs/guards/dict_watch.h"
#include "graphs/python_reference.h"

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

bool is_one_of(PyObject* key, std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(),
                       [&](const char* name) { return PyUnicode_CompareWithASCIIString(key, name) == 0; });
}

// Whether a step leads to the same object for as long as its parent is the same one, or, of functions, is watched.
// Another parent may stand at the address of a dead one, so this counts for pinned ones alone.
bool leads_by_parent_alone(StepKind kind, PyObject* parent, PyObject* key) {
    if (kind == StepKind::kPosition) return PyTuple_Check(parent);
    if (kind == StepKind::kInstanceDict) return PyModule_Check(parent);
    if (kind != StepKind::kAttribute || !PyUnicode_CheckExact(key)) return false;
    if (PyMethod_Check(parent)) return is_one_of(key, {"__func__", "__self__"});
    if (!PyFunction_Check(parent)) return false;
    if (is_one_of(key, {"__closure__", "__globals__"})) return true;
    return is_one_of(key, {"__code__", "__defaults__", "__kwdefaults__"}) && watch_functions();
}

}  // namespace

Guard::Identity::Identity(const py::object& object) {
    if (object.is_none()) return;
    address_ = object.ptr();
    reference_ = py::reinterpret_steal<py::object>(PyWeakref_NewRef(object.ptr(), nullptr));
    is_weak_ = bool(reference_);
    if (!is_weak_) {
        PyErr_Clear();
        reference_ = object;
    }
}

bool Guard::Identity::matches(PyObject* found) const { return !address_ || (found == address_ && live() == found); }

PyObject* Guard::Identity::live() const { return is_weak_ ? live_object(reference_.ptr()) : reference_.ptr(); }

Guard::~Guard() {
    if (!Py_IsInitialized()) {
        for (Step& step : steps_) {  // the interpreter is gone, and with it the objects
            step.key.release();
            step.expected.release();
            step.type.release();
        }
        return;
    }
    const py::gil_scoped_acquire gil;
    steps_.clear();
}

int Guard::add_step(StepKind kind, int parent, py::object key, int64_t index, py::object expected, std::string subject,
                    bool is_ephemeral) {
    steps_.push_back({kind, parent, std::move(key), index, Identity(expected), std::move(subject), is_ephemeral});
    if (is_attribute(steps_.back())) name_attribute(steps_.back().key.ptr());
    return static_cast<int>(steps_.size()) - 1;
}

int Guard::visit_held(visitproc visit, void* arg) const {
    for (const Step& step : steps_) {
        Py_VISIT(step.expected.held());
        Py_VISIT(step.key.ptr());
        // What others own as well is not this guard's to count.
        const bool is_own = step.value && step.value.use_count() == 1;
        if (const int stop = is_own ? step.value->visit(visit, arg) : 0) return stop;
    }
    return 0;
}

void Guard::drop_held() {
    is_dropped_ = true;
    const std::vector<Step> held = std::move(steps_);  // dropped once the guard is in order: objects may call back
    steps_.clear();
}

int Guard::add_tensor(int step, const at::Tensor& tensor, bool is_used, bool is_written, bool compares_hooks) {
    steps_[step].tensor = static_cast<int>(tensors_.size());
    tensors_.push_back({step, TensorFacts(tensor), tensor.requires_grad(), is_used, is_written, compares_hooks,
                        compares_hooks && has_gradient_hooks(tensor)});
    return steps_[step].tensor;
}

// Items of dictionaries, except those of a function's globals, which training scripts change all the time, and of
// instances where Python keeps their values in the object: attributes then change without telling watchers.
bool Guard::is_in_watched_dict(const Step& step) const {
    constexpr bool kHasValuesInObjects = PY_VERSION_HEX >= 0x030D0000;
    const bool is_dict = step.kind == StepKind::kItem || step.kind == StepKind::kAbsent ||
                         step.kind == StepKind::kLength || step.kind == StepKind::kKeys ||
                         step.kind == StepKind::kItemOf ||
                         (step.kind == StepKind::kContents && step.value && step.value->is_watchable());
    if (!is_dict || step.is_ephemeral) return false;
    if (step.parent < 0) return true;
    const StepKind parent = steps_[step.parent].kind;
    return parent != StepKind::kAttribute && !(kHasValuesInObjects && parent == StepKind::kInstanceDict);
}

// One attribute of an object, by name: what happens to the others does not matter.
bool Guard::is_attribute(const Step& step) const {
    return (step.kind == StepKind::kItem || step.kind == StepKind::kAbsent) && step.parent >= 0 &&
           steps_[step.parent].kind == StepKind::kInstanceDict && PyUnicode_CheckExact(step.key.ptr());
}

bool Guard::watch(const Step& step, PyObject* parent, const Walk& walk) const {
    if (step.kind == StepKind::kCode) return watch_functions();
    const bool is_pinned = step.parent >= 0 && !step.is_ephemeral && walk.is_pinned[step.parent];
    if (is_pinned && leads_by_parent_alone(step.kind, parent, step.key.ptr())) return true;
    if (!is_in_watched_dict(step) || !PyDict_Check(parent)) return false;
    // An OrderedDict keeps its order elsewhere, which counts from two items on.
    const bool has_order = step.kind == StepKind::kKeys || step.kind == StepKind::kContents;
    if (has_order && PyODict_Check(parent) && PyDict_GET_SIZE(parent) > 1) return false;
    return is_attribute(step) ? watch_attributes(parent) : watch_dict(parent);
}

bool Guard::pins(const Step& step, bool is_watched) {
    return is_watched || (step.kind == StepKind::kKnown && !step.expected.is_any());
}

PyObject* Guard::take(const Step& step, PyObject* parent, const std::vector<PyObject*>& reached) {
    if (step.kind == StepKind::kKnown) return step.expected.live();
    PyObject* const key = step.kind == StepKind::kItemOf ? reached[step.index] : step.key.ptr();
    return take_step(step.kind, parent, key, step.index);
}

bool Guard::is_expected(const Step& step, PyObject* object, const std::vector<PyObject*>& reached) {
    if (step.same_as >= 0 && object != reached[step.same_as]) return false;
    if (step.value && !step.value->matches(object)) return false;
    return step.type.matches(reinterpret_cast<PyObject*>(Py_TYPE(object))) && step.expected.matches(object);
}

std::string Guard::difference(const Step& step, PyObject* object) {
    if (step.value && !step.value->matches(object)) return step.value->difference(step.subject, object);
    if (!step.type.matches(reinterpret_cast<PyObject*>(Py_TYPE(object)))) {
        return step.subject + " is now a " + Py_TYPE(object)->tp_name;
    }
    if (PyBool_Check(object)) return step.subject + (object == Py_True ? " is now True" : " is now False");
    return step.subject + " was replaced by another object";
}

std::string Guard::walk(PyObject* root, std::vector<PyObject*>* found, Walk& walk, Held& held) const {
    if (is_dropped_) return "what the graph takes for granted is gone";
    std::vector<PyObject*>& reached = walk.reached;
    reached.assign(steps_.size(), nullptr);
    walk.is_pinned.assign(steps_.size(), false);
    held.reserve(steps_.size());
    for (size_t i = 0; i < steps_.size(); ++i) {
        const Step& step = steps_[i];
        PyObject* const parent = step.parent < 0 ? root : reached[step.parent];
        const bool is_by_version = step.kind == StepKind::kClass || step.kind == StepKind::kMember;
        const bool is_watched = !is_by_version && watch(step, parent, walk);
        if (!is_by_version && !is_watched) walk.unwatched.push_back(i);
        walk.is_pinned[i] = pins(step, is_watched);
        PyObject* const object = held(take(step, parent, reached));
        if (step.kind == StepKind::kClass) walk.classes.emplace_back(i, type_of(parent)->tp_version_tag);
        reached[i] = object;
        if (!object) {
            if (step.kind == StepKind::kNever) return step.subject;
            const bool is_count = step.kind == StepKind::kLength || step.kind == StepKind::kAbsent ||
                                  step.kind == StepKind::kKeys || step.kind == StepKind::kTypeAbsent ||
                                  step.kind == StepKind::kTypeVersion || step.kind == StepKind::kNoAttribute;
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
        if (!is_expected(step, object, reached)) return difference(step, object);
    }
    return {};
}

std::string Guard::compare(const ExpectedTensor& expected, const at::Tensor& tensor, bool compare_requires_grad) {
    // On every call of every tensor: no message, and no stream to build one, unless something differs.
    if (is_same(expected, tensor, compare_requires_grad)) return {};
    const TensorFacts& facts = expected.facts;
    std::ostringstream change;
    if (tensor.scalar_type() != facts.dtype()) {
        change << " changed dtype from " << dtype_name(facts.dtype()) << " to " << dtype_name(tensor.scalar_type());
    } else if (tensor.sizes() != facts.sizes()) {
        change << " changed shape from " << facts.sizes() << " to " << tensor.sizes();
    } else if (tensor.device() != facts.device()) {
        change << " changed device from " << facts.device() << " to " << tensor.device();
    } else if (expected.is_used && !facts.is_address_of(*tensor.unsafeGetTensorImpl())) {
        change << " moved to other memory";
    } else if (tensor.strides() != facts.strides()) {
        change << " changed strides from " << facts.strides() << " to " << tensor.strides();
    } else if (!facts.has_bits_of(tensor)) {
        change << " became, or is no longer, a conjugate or negative view";
    } else if (!facts.has_names_of(tensor)) {
        change << " changed the names of its dimensions";
    } else if (expected.compares_hooks && has_gradient_hooks(tensor) != expected.has_hooks) {
        change << (expected.has_hooks ? " has lost its gradient hooks" : " has gradient hooks now");
    } else {
        change << " changed requires_grad from " << (expected.requires_grad ? "True" : "False");
    }
    return change.str();
}

}  // namespace te_graph::graphs
