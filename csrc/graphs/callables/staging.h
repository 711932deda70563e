// Where a backward graph reads the gradient of one of its callable's results.
//
// Either ordinary memory, which all backwards of a group share for gradients of one kind: each fills it right before
// its launch, and launches do not overlap. Or, in a chain, the memory that the successor's backward writes its input
// gradient to: then nothing is copied as long as that very gradient arrives.
#pragma once

#include <ATen/core/Tensor.h>

namespace te_graph::graphs {

struct Staging {
    at::Tensor tensor;        // what the graph reads
    bool is_lent;             // over memory that is lent as an input gradient
    bool is_zero = false;     // known to hold zeros; never of lent memory, which others write
    bool is_written = false;  // by a graph that changes in place what it is given

    // A graph writes it, and has done so at its capture.
    void note_write() {
        is_written = true;
        is_zero = false;
    }

    // True when `grad` is what the graph will read.
    bool holds(const at::Tensor& grad) const {
        return grad.defined() && grad.const_data_ptr() == tensor.const_data_ptr() && grad.sizes() == tensor.sizes() &&
               grad.strides() == tensor.strides() && grad.scalar_type() == tensor.scalar_type() && !grad.is_conj() &&
               !grad.is_neg();
    }
};

}  // namespace te_graph::graphs
