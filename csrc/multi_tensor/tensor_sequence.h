// Tensors that Python code gives in a list or tuple.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

namespace te_graph::multi_tensor {

// A list or tuple of tensors, borrowed; `op` and `name` are what messages call it.
class TensorSequence {
public:
    TensorSequence(const pybind11::handle& sequence, const char* op, const char* name)
        : items_(pybind11::reinterpret_steal<pybind11::object>(
              PySequence_Fast(sequence.ptr(), "expected a sequence of tensors"))),
          op_(op),
          name_(name) {
        if (!items_) throw pybind11::error_already_set();
    }
    size_t size() const { return static_cast<size_t>(PySequence_Fast_GET_SIZE(items_.ptr())); }
    // -> [...].
    const at::Tensor& operator[](size_t i) const {
        PyObject* const item = PySequence_Fast_GET_ITEM(items_.ptr(), static_cast<Py_ssize_t>(i));
        TORCH_CHECK_TYPE(THPVariable_Check(item), op_, ": expected ", name_, "[", i, "] to be a tensor, got ",
                         Py_TYPE(item)->tp_name);
        return THPVariable_Unpack(item);
    }
    // -> [...] each.
    std::vector<at::Tensor> tensors() const {
        std::vector<at::Tensor> tensors;
        for (size_t i = 0; i < size(); ++i) tensors.push_back((*this)[i]);
        return tensors;
    }

private:
    pybind11::object items_;
    const char *op_, *name_;
};

}  // namespace te_graph::multi_tensor
