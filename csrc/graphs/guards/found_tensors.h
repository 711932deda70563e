// The tensors that a guard's walk has found, kept for the calls and backwards that follow.
//
// They are held as Python objects, not as tensors: a tensor that C++ holds is beyond the garbage collector's reach, and
// with it all that it refers to (a hook's closure, an attribute), often the very module that owns the guard. And one
// reference for all means that a call counts none: each count is a cache line that the thread of the backward has.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

namespace te_graph::graphs {

class FoundTensors {
public:
    // tensors: borrowed references.
    explicit FoundTensors(std::vector<PyObject*> tensors);
    // On any thread; takes the GIL.
    ~FoundTensors();
    FoundTensors(const FoundTensors&) = delete;
    FoundTensors& operator=(const FoundTensors&) = delete;

    size_t size() const { return objects_.size(); }
    // Needs no GIL.
    const at::Tensor& operator[](size_t i) const { return THPVariable_Unpack(objects_[i]); }
    // True while the Python object still stands for the tensor that was found: torch.utils.swap_tensors changes that.
    bool is_unswapped(size_t i) const { return (*this)[i].unsafeGetTensorImpl() == impls_[i]; }

    int visit(visitproc visit, void* arg) const;

private:
    std::vector<PyObject*> objects_;
    std::vector<const c10::TensorImpl*> impls_;
};

}  // namespace te_graph::graphs
