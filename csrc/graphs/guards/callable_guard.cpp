#include "graphs/guards/callable_guard.h"

#include <c10/util/ScopeExit.h>

#include <utility>

#include "graphs/guards/dict_watch.h"

namespace te_graph::graphs {

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
        std::swap(last_, met);
        root_ = root;
        changes_ = changes;
    }
    return {};
}

bool CallableGuard::is_as_last_time(PyObject* root) const {
    if (root != root_ || changes_ != dict_changes()) return false;
    for (const size_t i : last_.unwatched) {
        const Step& step = steps_[i];
        PyObject* const object = take(step, step.parent < 0 ? root : last_.reached[step.parent], last_.reached);
        if (!object || object != last_.reached[i] || !is_expected(step, object, last_.reached)) return false;
    }
    for (const auto& [i, version] : last_.classes) {
        PyObject* const parent = steps_[i].parent < 0 ? root : last_.reached[steps_[i].parent];
        if (type_of(parent)->tp_version_tag != version || version == 0) return false;
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
