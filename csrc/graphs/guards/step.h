// One step of a guard: from an object to another one that it leads to.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace te_graph::graphs {

enum class StepKind : uint8_t {
    kInstanceDict,  // the __dict__ of the parent
    kItem,          // parent[key] of a dict
    kAbsent,        // parent must be a dict without key
    kLength,        // len(parent), of a dict without the keys of the tuple `key` if it is one, must be `index`
    kKeys,          // the keys of a dict must be those of the tuple `key`, in this order
    kItemOf,        // parent[the object that step `index` reached] of a dict
    kPosition,      // parent[index] of a list or tuple
    kCell,          // contents of a closure cell
    kAttribute,     // getattr(parent, key), for objects without a dict such as functools.partial
    kGrad,          // parent.grad of a tensor; leads nowhere, so no Python object is made for it
    kKnown,         // the expected object itself, as long as it lives: classes and functions outlive instances
    kType,          // the class of the parent
    kTypeItem,      // what the class `parent` has under key, itself or from a base, without binding it
    kTypeAbsent,    // the class `parent` must not have key
    kTypeVersion,   // the class `parent`, which together with its bases must have the version `index`
    kNoAttribute,   // the parent, which must have nothing in its slot `key`
    kClass,         // the class that a user knows of the parent, or the parent itself if that is a class
    kMember,    // as kTypeItem, below kClass; NotImplemented: nothing. Not looked up again while the class is as it was
    kCode,      // the code of the function that the weak reference `key` refers to; NotImplemented: that is gone
    kContents,  // the parent, whose contents must be those of a snapshot
    kElement,   // parent[index] of another sequence, such as a deque
    kReferent,  // the dictionary under a view of one, or under a mappingproxy
    kContextVar,     // the value of a ContextVar in the present context; NotImplemented: none
    kWeakReference,  // what a weak reference refers to; None: it is gone
    kCached,    // what a functools.lru_cache keeps under `key`; index: 1 where it has a size, and lets go of others
    kConstant,  // the object `key`, which belongs to the process
    kNever,     // nothing that can be compared: no check passes, and `subject` is the reason
};

// The object that a step leads to, borrowed from its container, or nullptr when it is not there.
PyObject* take_step(StepKind kind, PyObject* parent, PyObject* key, Py_ssize_t index);

// `object` itself if it is a class, else its class.
PyTypeObject* type_of(PyObject* object);

// The version of a class, which any change of it or of a base renews; 0 where Python has run out of them.
unsigned int type_version(PyTypeObject* type);

const at::Tensor& grad_of(PyObject* tensor);

}  // namespace te_graph::graphs
