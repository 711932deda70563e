#include "graphs/guards/function_guard.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "graphs/guards/dict_watch.h"

namespace py = pybind11;

namespace te_graph::graphs {

std::string FunctionGuard::check(PyObject* root) const {
    Held held;
    return check(root, held);
}

std::string FunctionGuard::check(PyObject* root, Held& held) const {
    if (is_as_before(root, held)) return {};
    root_ = nullptr;
    const uint64_t changes = dict_changes();
    Walk met;
    if (std::string change = walk(root, nullptr, met, held); !change.empty()) return change;
    std::swap(last_, met);
    note_what_is_watched();
    root_ = root;
    changes_ = changes;
    return {};
}

std::string FunctionGuard::find(PyObject* root, const std::vector<int>& steps, std::vector<py::object>& found) const {
    return find(root, steps, found, /*writes=*/false);
}

std::string FunctionGuard::begin(PyObject* root, const std::vector<int>& steps, std::vector<py::object>& found) const {
    return find(root, steps, found, /*writes=*/true);
}

std::string FunctionGuard::find(PyObject* root, const std::vector<int>& steps, std::vector<py::object>& found,
                                bool writes) const {
    Held held;
    if (std::string change = check(root, held); !change.empty()) return change;
    if (writes) bump_versions();
    for (const int step : steps) found.push_back(py::reinterpret_borrow<py::object>(last_.reached.at(step)));
    return {};
}

// As the last check found it, though some objects may be others. Those below which nothing is taken again must not be.
// Where a step ran Python code, another thread may have changed a dictionary: then nothing below it counts.
bool FunctionGuard::is_as_before(PyObject* root, Held& held) const {
    if (!root_ || changes_ != dict_changes()) return false;
    held.reserve(last_.unwatched.size());
    for (const size_t i : last_.unwatched) {
        const Step& step = steps_[i];
        PyObject* const parent = step.parent < 0 ? root : last_.reached[step.parent];
        PyObject* const object = held(take(step, parent, last_.reached));
        if (!object || (object != last_.reached[i] && leads_to_watched_[i])) return false;
        if (!is_expected(step, object, last_.reached) || changes_ != dict_changes()) return false;
        last_.reached[i] = object;
        if (step.tensor >= 0 && !has_tensor(step, parent, object)) return false;
    }
    return std::all_of(watched_tensors_.begin(), watched_tensors_.end(), [&](size_t i) {
        return has_tensor(steps_[i], last_.reached[steps_[i].parent], last_.reached[i]);
    });
}

bool FunctionGuard::has_tensor(const Step& step, PyObject* parent, PyObject* object) const {
    const ExpectedTensor& expected = tensors_[step.tensor];
    if (step.kind == StepKind::kGrad) return object != Py_None && is_same(expected, grad_of(parent), true);
    return THPVariable_Check(object) && is_same(expected, THPVariable_Unpack(object), true);
}

void FunctionGuard::note_what_is_watched() const {
    std::vector<char> is_taken(steps_.size(), 0);
    for (const size_t i : last_.unwatched) is_taken[i] = 1;
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

void FunctionGuard::bump_versions() const {
    for (const ExpectedTensor& expected : tensors_) {
        if (!expected.is_written) continue;
        PyObject* const object = last_.reached[expected.step];
        const at::Tensor& tensor =
            steps_[expected.step].kind == StepKind::kGrad ? grad_of(object) : THPVariable_Unpack(object);
        if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
}

}  // namespace te_graph::graphs
