// The guard of a function, which is called with whatever the caller has at hand: what is found may be other objects
// each time, and none of it is kept.
#pragma once

#include <string>
#include <vector>

#include "graphs/guards/guard.h"

namespace te_graph::graphs {

class FunctionGuard final : public Guard {
public:
    // Checks from `root` on, for one thread at a time. Returns an empty string, or what has changed.
    std::string check(PyObject* root) const;
    // The same. If nothing has changed, puts what `steps` reached into `found`.
    std::string find(PyObject* root, const std::vector<int>& steps, std::vector<pybind11::object>& found) const;
    // The same, and notes in the version counters that the written tensors are written.
    std::string begin(PyObject* root, const std::vector<int>& steps, std::vector<pybind11::object>& found) const;

private:
    std::string find(PyObject* root, const std::vector<int>& steps, std::vector<pybind11::object>& found,
                     bool writes) const;
    std::string check(PyObject* root, Held& held) const;
    bool is_as_before(PyObject* root, Held& held) const;
    bool has_tensor(const Step& step, PyObject* parent, PyObject* object) const;
    void note_what_is_watched() const;
    void bump_versions() const;

    // Of the last walk that found everything as it must be.
    mutable Walk last_;                            // what it met is alive while `changes_` is up to date
    mutable std::vector<size_t> watched_tensors_;  // steps that reach tensors and are not taken at each check
    mutable std::vector<char> leads_to_watched_;   // [steps] whether one below it is not taken at each check
    mutable PyObject* root_ = nullptr;
    mutable uint64_t changes_ = 0;
};

}  // namespace te_graph::graphs
