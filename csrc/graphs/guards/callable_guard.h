// The guard of a callable, whose backward goes on with the tensors that the check of its forward has found.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "graphs/guards/found_tensors.h"
#include "graphs/guards/guard.h"
#include "graphs/python_reference.h"

namespace te_graph::graphs {

class CallableGuard final : public Guard {
public:
    using Tensors = std::shared_ptr<const FoundTensors>;

    // Checks from `root` on. Puts the tensors into `found` and returns an empty string, or returns what has changed.
    std::string check(PyObject* root, Tensors& found) const;

    // Compares tensors found by an earlier check() again: they may have moved since. Their requires_grad no
    // longer matters, as for a backward in eager execution. Needs no GIL.
    std::string check_tensors(const FoundTensors& found) const;

    // Lets what `functions` holds live as long as this guard and all that share it: what no source leads to would be
    // missed.
    void keep(pybind11::object functions) {
        functions_ = std::make_shared<const PythonReference>(std::move(functions));
    }
    const std::shared_ptr<const PythonReference>& functions() const { return functions_; }

    // Whether the object lives that the first step, one to a known object, leads to.
    bool is_rooted() const { return !steps_.empty() && steps_.front().expected.live(); }

    // For the garbage collector. What a backward still needs is no business of the guard's alone.
    int visit(visitproc visit, void* arg) const {
        if (const int stop = visit_held(visit, arg)) return stop;
        if (functions_.use_count() == 1) Py_VISIT(functions_->get().ptr());
        return found_.use_count() == 1 ? found_->visit(visit, arg) : 0;
    }
    // Releases what the last walk found.
    void forget() const;

private:
    // A step to take again, with what the last walk met on it. The steps themselves lie far apart in memory, and
    // reading them would take longer than taking them.
    struct Look {
        StepKind kind;
        Py_ssize_t index;
        PyObject *parent, *key, *object;
        const Step* step;  // what its object must be like is compared again; nullptr: to be the same object is enough
    };
    // An object whose class, or that is a class, which must have the version.
    struct ClassLook {
        PyObject* object;
        unsigned int version;
    };

    bool is_as_last_time(PyObject* root) const;
    // Notes what a walk from `root` has met.
    void note(PyObject* root, Walk&& met) const;
    // Puts into `kept` what `kept_` is to have of it.
    Look look_at(size_t step, PyObject* root, pybind11::list& kept) const;

    std::shared_ptr<const PythonReference> functions_;

    // Of the last walk that found everything as it must be.
    mutable Tensors found_;
    mutable Walk last_;  // what it met is alive while `changes_` is up to date
    mutable std::vector<Look> looks_;
    mutable std::vector<ClassLook> classes_;
    // A list of values that refer to nothing, so that no others take their places.
    mutable std::unique_ptr<const PythonReference> kept_;
    mutable PyObject* root_ = nullptr;
    mutable uint64_t changes_ = 0;
    mutable bool is_in_check_ = false;  // by a thread that another one has interrupted
};

}  // namespace te_graph::graphs
