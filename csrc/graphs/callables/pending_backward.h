// What a backward needs of the forward that it belongs to.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "common/note_writes.h"
#include "graphs/callables/slot_leases.h"
#include "graphs/guards/callable_guard.h"
#include "graphs/python_reference.h"

namespace te_graph::graphs {

class GraphedCallable;

// An input that the backward reads where the predecessor left it: it must not be modified in between.
struct LinkedInput {
    LinkedInput(size_t number, const at::Tensor& tensor)
        : input(number),
          version(tensor.unsafeGetTensorImpl()->version_counter()),
          version_at_forward(version.current_version()) {}
    size_t input;
    c10::VariableVersion version;
    uint32_t version_at_forward;
};

// An input that gets a gradient.
struct InputEdge {
    int input;
    bool is_leaf;  // it keeps what it gets as .grad
    size_t uses;   // inside the callable: as many edges
    // With several uses only. Others hold the node that made the input: they may use the input as well.
    bool is_shared = false;
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
};

// One forward whose backward is due. Keeps its slot busy.
struct PendingBackward {
    PendingBackward(std::shared_ptr<GraphedCallable> of, SlotLease slot)
        : callable(std::move(of)), lease(std::move(slot)) {}

    std::shared_ptr<GraphedCallable> callable;
    SlotLease lease;
    CallableGuard::Tensors externals;                           // [guard's tensors], as found by the forward
    std::shared_ptr<const PythonReference> functions;           // that the guard keeps, also once its owner is gone
    c10::SmallVector<uint32_t, 16> saved_versions;              // [externals that autograd saved] after the forward
    c10::SmallVector<c10::VariableVersion, 1> output_versions;  // [outputs that the backward reads]
    c10::SmallVector<LinkedInput, 1> linked_inputs;             // those that autograd saved
    c10::SmallVector<InputEdge, 2> input_edges;                 // inputs that have edges, in the order of the edges
    std::vector<int> autograd_parameters;                       // parameters that have an edge, in that order
    bool owes_gradients = false;                                // its backward for inputs alone was not the last
};

}  // namespace te_graph::graphs
