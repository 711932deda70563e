#include "graphs/guards/callable_guard.h"

#include <c10/util/ScopeExit.h>

#include <utility>

#include "graphs/guards/dict_watch.h"

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

// An object that is never changed, and keeps nothing alive.
bool refers_to_nothing(PyObject* object) {
    return PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
           PyBytes_CheckExact(object) || PyBool_Check(object) || object == Py_None;
}

}  // namespace

std::string CallableGuard::check(PyObject* root, Tensors& found) const {
    // Where Python code runs, of keys and destructors, other threads may come in: they look for themselves.
    const bool is_alone = !is_in_check_;
    const auto done = c10::make_scope_exit([&] {
        if (is_alone) is_in_check_ = false;
    });
    is_in_check_ = true;
    if (is_alone && is_as_last_time(root)) {
        found = found_;
        return {};
    }
    if (is_alone) forget();
    const uint64_t changes = dict_changes();
    std::vector<PyObject*> tensors(tensors_.size());
    Walk met;
    Held held;
    if (std::string change = walk(root, &tensors, met, held); !change.empty()) return change;
    found = std::make_shared<FoundTensors>(std::move(tensors));
    if (is_alone) {
        found_ = found;
        note(root, std::move(met));
        changes_ = changes;
    }
    return {};
}

void CallableGuard::note(PyObject* root, Walk&& met) const {
    root_ = root;
    last_ = std::move(met);
    py::list kept;
    looks_.clear();
    for (const size_t i : last_.unwatched) looks_.push_back(look_at(i, root, kept));
    kept_ = std::make_unique<const PythonReference>(kept);
    classes_.clear();
    for (const auto& [i, version] : last_.classes) {
        classes_.push_back({steps_[i].parent < 0 ? root : last_.reached[steps_[i].parent], version});
    }
}

CallableGuard::Look CallableGuard::look_at(size_t i, PyObject* root, py::list& kept) const {
    const Step& step = steps_[i];
    PyObject* const object = last_.reached[i];
    PyObject* const key = step.kind == StepKind::kItemOf  ? last_.reached[step.index]
                          : step.kind == StepKind::kKnown ? step.expected.weak()
                                                          : step.key.ptr();
    const bool is_kept = refers_to_nothing(object);
    if (is_kept) kept.append(py::handle(object));
    const bool is_found_alive = is_kept || step.kind == StepKind::kKnown || !step.expected.is_weak();
    const bool is_same_enough = is_found_alive && (is_kept || (!step.value && step.type.is_any()));
    return {step.kind, step.index, step.parent < 0 ? root : last_.reached[step.parent],
            key,       object,     is_same_enough ? nullptr : &step};
}

bool CallableGuard::is_as_last_time(PyObject* root) const {
    if (root != root_ || changes_ != dict_changes()) return false;
    for (const Look& look : looks_) {
        if (changes_ != dict_changes())
            return false;  // by Python code that a step has run, or another thread meanwhile
        if (look.kind == StepKind::kKnown) {
            if (look.key && live_object(look.key) != look.object) return false;
        } else if (take_step(look.kind, look.parent, look.key, look.index) != look.object) {
            return false;
        }
        if (look.step && !is_expected(*look.step, look.object, last_.reached)) return false;
    }
    for (const auto& [object, version] : classes_) {
        if (type_of(object)->tp_version_tag != version || version == 0) return false;
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
        if (!found_->is_unswapped(i) || !is_same(tensors_[i], (*found_)[i], true)) return false;
    }
    return true;
}

void CallableGuard::forget() const {
    root_ = nullptr;
    const Tensors last = std::move(found_);  // dropped once this is in order: objects may call back
    found_ = nullptr;
}

std::string CallableGuard::check_tensors(const FoundTensors& found) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
        if (!found.is_unswapped(i)) return tensor_name(i) + " was swapped with another tensor";
        if (is_same(tensors_[i], found[i], false)) continue;
        if (std::string change = compare(tensors_[i], found[i], false); !change.empty()) return tensor_name(i) + change;
    }
    return {};
}

}  // namespace te_graph::graphs
