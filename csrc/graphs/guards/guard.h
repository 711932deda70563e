// What a graph takes for granted about Python objects and tensors that it does not own, checked before every replay.
//
// A guard is a small program: steps that walk from the callable through dictionaries, lists and closure cells, each to
// an object that must still be the one seen at capture, and tensors met on the way, whose address, shape, strides,
// dtype and requires_grad must be what they were. Each step starts from its live parent, so the pointers compared are
// never stale. Nothing is owned but the tensors that the last walk found and expected objects that have no weak
// references, and these the garbage collector knows of.
//
// Dictionaries on the way are watched (Python 3.12 or newer). As long as none has changed, a check takes only the
// steps that lead elsewhere (instance to dictionary, lists, cells) and compares the tensors that the last walk found.
//
// How often the objects found may be others is what callables (callable_guard.h) and functions (function_guard.h)
// differ in.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "graphs/guards/step.h"
#include "graphs/guards/tensor_facts.h"
#include "graphs/guards/value.h"
#include "graphs/hooks.h"

namespace te_graph::graphs {

// Objects that are kept alive for as long as this is there.
class Held {
public:
    Held() = default;
    ~Held() {
        for (PyObject* const object : objects_) Py_DECREF(object);
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    PyObject* operator()(PyObject* object) {
        Py_XINCREF(object);
        if (object) objects_.push_back(object);
        return object;
    }
    void reserve(size_t count) { objects_.reserve(count); }

private:
    std::vector<PyObject*> objects_;
};

class Guard {
public:
    // Autograd may drop the last owner on a thread that does not hold the GIL.
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

    // Adds a step from the object that step `parent` reached (-1: the callable itself); returns its number.
    // expected: the object that must be found, or None for any. subject: what the message calls it.
    // is_ephemeral: the parent may be another object at each call, so that watching it would tell nothing.
    int add_step(StepKind kind, int parent, pybind11::object key, int64_t index, pybind11::object expected,
                 std::string subject, bool is_ephemeral = false);
    // The object that `step` reaches is `tensor`; its place in `found` is the number returned. is_used: its memory
    // matters, and not its dtype, device, shape and strides alone. is_written: bump_versions() moves its version
    // counter.
    // compares_hooks: whether there are hooks on its gradient matters.
    int add_tensor(int step, const at::Tensor& tensor, bool is_used = true, bool is_written = false,
                   bool compares_hooks = false);
    // As `expected` of add_step().
    void expect_identity(int step, const pybind11::object& object) { steps_[step].expected = Identity(object); }
    // The object that `step` reaches must be as `value` says.
    void expect_value(int step, std::shared_ptr<const Value> value) { steps_[step].value = std::move(value); }
    // It must be of exactly this type.
    void expect_type(int step, const pybind11::object& type) { steps_[step].type = Identity(type); }
    // It must be the very object that the earlier step `other` reaches.
    void expect_same(int step, int other) { steps_[step].same_as = other; }

    // For the garbage collector: objects that are kept alive. Dropping them is the end of the guard: no check passes.
    int visit_held(visitproc visit, void* arg) const;
    void drop_held();

    size_t tensors() const { return tensors_.size(); }
    size_t steps() const { return steps_.size(); }
    const std::string& tensor_name(size_t tensor) const { return steps_[tensors_[tensor].step].subject; }

protected:
    Guard() = default;

    // An object to be found again, by weak reference where its type has them; others are kept alive, so that no new
    // object at the address of a dead one is taken for it.
    class Identity {
    public:
        Identity() = default;
        explicit Identity(const pybind11::object& object);
        bool matches(PyObject* found) const;
        // The object, borrowed; nullptr once it is gone.
        PyObject* live() const;
        bool is_weak() const { return is_weak_; }
        bool is_any() const { return address_ == nullptr; }
        // The weak reference, borrowed, if there is one.
        PyObject* weak() const { return is_weak_ ? reference_.ptr() : nullptr; }
        // The object, borrowed, if it is kept alive.
        PyObject* held() const { return is_weak_ ? nullptr : reference_.ptr(); }
        void release() { reference_.release(); }

    private:
        PyObject* address_ = nullptr;  // nullptr: any object
        pybind11::object reference_;   // a weak one if is_weak_, else the object
        bool is_weak_ = false;
    };

    struct Step {
        StepKind kind;
        int parent;
        pybind11::object key;  // strings, numbers and the like, weak references
        Py_ssize_t index;
        Identity expected;
        std::string subject;
        bool is_ephemeral;
        int tensor = -1;
        std::shared_ptr<const Value> value{};
        Identity type{};
        int same_as = -1;
    };
    struct ExpectedTensor {
        int step;
        TensorFacts facts;
        bool requires_grad;
        bool is_used, is_written;
        bool compares_hooks, has_hooks;
    };

    static bool is_same(const ExpectedTensor& expected, const at::Tensor& tensor, bool compare_requires_grad) {
        const TensorFacts& facts = expected.facts;
        return (expected.is_used ? facts.match(tensor) : facts.has_form_of(tensor)) &&
               (!compare_requires_grad || tensor.requires_grad() == expected.requires_grad) &&
               (!expected.compares_hooks || has_gradient_hooks(tensor) == expected.has_hooks);
    }
    // What a walk has met.
    struct Walk {
        std::vector<PyObject*> reached;                        // [steps], borrowed
        std::vector<char> is_pinned;                           // [steps], see pins()
        std::vector<size_t> unwatched;                         // steps that are taken at each check
        std::vector<std::pair<size_t, unsigned int>> classes;  // steps that lead to one, and what version it had
    };

    static std::string compare(const ExpectedTensor& expected, const at::Tensor& tensor, bool compare_requires_grad);
    static PyObject* take(const Step& step, PyObject* parent, const std::vector<PyObject*>& reached);
    static bool is_expected(const Step& step, PyObject* object, const std::vector<PyObject*>& reached);
    // found: [tensors], filled, or null. What is met lives until `held` goes: other threads may drop it meanwhile.
    std::string walk(PyObject* root, std::vector<PyObject*>* found, Walk& walk, Held& held) const;

    std::vector<Step> steps_;
    std::vector<ExpectedTensor> tensors_;
    bool is_dropped_ = false;

private:
    bool is_in_watched_dict(const Step& step) const;
    bool is_attribute(const Step& step) const;
    bool watch(const Step& step, PyObject* parent, const Walk& walk) const;
    // Whether no other object can take the place in memory of the one that `step` reaches without a check noticing:
    // the step is watched, and so tells when the object goes, or known to lead to one that lives.
    static bool pins(const Step& step, bool is_watched);
    static std::string difference(const Step& step, PyObject* object);
};

}  // namespace te_graph::graphs
