// What a Python object held at capture, if that is nothing but constants: numbers, strings, nests of them.
//
// A snapshot compares as a Python program can tell: types exactly, 0.0 not like -0.0, dictionaries and sets in the
// order in which they are iterated over. It is compared in one step, however large the nest is.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace te_graph::graphs {

// Objects of exactly `type` are compared by what `key` makes of them: a nest of constants, or None for one that cannot
// be compared. is_mutable: the same object may have another key later.
void register_value_type(const pybind11::object& type, const pybind11::object& key, bool is_mutable);

class Value {
public:
    // nullptr for an object that holds more than constants. Members of sets may be any objects.
    static std::unique_ptr<Value> of(PyObject* object) { return of(object, 0); }
    // The keys of a dictionary alone, which may be any objects.
    static std::unique_ptr<Value> of_keys(PyObject* dict);
    ~Value();
    Value(const Value&) = delete;
    Value& operator=(const Value&) = delete;

    // May run Python code, of the key functions alone.
    bool matches(PyObject* found) const;
    // How `found`, which messages call `name`, differs; after matches() has said that it does.
    std::string difference(const std::string& name, PyObject* found) const;
    bool is_mutable() const { return is_mutable_; }
    // For the garbage collector: classes of constants and members without weak references may lead anywhere.
    int visit(visitproc visit, void* arg) const;
    // Everything is a dictionary's own, attributes that may be put on it among it: watching that one shows all changes.
    bool is_watchable() const {
        return kind_ == Kind::kKeys || (kind_ == Kind::kDict && !holds_mutable_ && !type_->tp_dictoffset);
    }

private:
    enum class Kind : uint8_t { kConstant, kWeak, kSequence, kSet, kDict, kKeys, kBuffer, kKeyed };
    struct Item {
        PyObject* constant = nullptr;  // owned
        std::unique_ptr<Value> nest;
    };

    explicit Value(Kind kind, PyObject* object);
    static std::unique_ptr<Value> of(PyObject* object, int depth);
    static std::unique_ptr<Value> of_sequence(PyObject* object, int depth);
    static std::unique_ptr<Value> of_set(PyObject* object);
    static std::unique_ptr<Value> of_dict(PyObject* object, int depth);
    static std::unique_ptr<Value> of_buffer(PyObject* object);
    static std::unique_ptr<Value> of_keyed(PyObject* object, int depth);
    bool add(PyObject* object, int depth);
    void add_member(PyObject* object);
    void keep_if_frozen(PyObject* object);
    static bool matches(const Item& item, PyObject* found);
    static std::string difference(const Item& item, const std::string& name, PyObject* found);

    Kind kind_;
    bool is_mutable_ = false, holds_mutable_ = false;
    bool holds_objects_ = false;  // objects that are no constants, weakly
    PyTypeObject* type_;          // owned
    PyObject* object_ = nullptr;  // owned: the constant, a weak reference, or what never changes: it is like itself
    PyObject* key_ = nullptr;     // owned: the function
    std::vector<Item> items_;     // of dictionaries: key, value, key, value
    std::string bytes_;           // of a buffer: how it is laid out, and what it holds
};

// Equal in type and value; NaN is equal to itself, 0.0 is not -0.0. False for what is no constant and another object.
bool is_same_constant(PyObject* expected, PyObject* found);

// Calls visit(key, value) for what `dict` holds, in the order of iteration, while it returns true; false if it did not,
// or if the dictionary changed meanwhile.
bool all_of_dict(PyObject* dict, const std::function<bool(PyObject*, PyObject*)>& visit);

// The representation of `object`, or of its type where that is long.
std::string shown(PyObject* object);

}  // namespace te_graph::graphs
