// Hooks on leaves: which leaves have them, and how to keep them out of a capture.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <vector>

#include "common/leaf.h"
#include "common/node_pointer.h"

namespace te_graph::graphs {

// True while an autograd graph leads to `leaf`: that of something computed from it outside the callable, or of a call
// that has an edge to it.
inline bool is_in_autograd_graph(const at::Tensor& leaf) {
    const torch::autograd::AutogradMeta* const meta = autograd_meta_of(leaf);
    return meta && !meta->grad_accumulator_.expired();
}

// Accumulates `grad` into `leaf` with its hooks, as the engine does at the end of an edge to `leaf`. For hooks that
// were added after the forward, when there was no edge.
void accumulate_with_hooks(const at::Tensor& leaf, at::Tensor grad);

// Takes leaves out of the user's autograd graphs while a capture uses them, and puts them back.
//
// Their tensor hooks: torch.autograd.grad runs them on the gradients that it returns; a capture must not, because
// autograd will run them on the replayed gradient. Their AccumulateGrad nodes: one that the user keeps alive belongs to
// the stream that it was made on, which a capture must not wait for.
class LeafIsolation {
public:
    // with_accumulators: only where the forward, too, runs inside; its edges lead to the nodes of its time.
    LeafIsolation(std::vector<at::Tensor> leaves, bool with_accumulators);
    ~LeafIsolation() { restore(); }
    LeafIsolation(const LeafIsolation&) = delete;
    LeafIsolation& operator=(const LeafIsolation&) = delete;
    // Autograd graphs that were made meanwhile must be gone by now. May be called again.
    void restore();

private:
    void exchange();

    struct Kept {
        std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks;
        WeakNodePointer accumulator{NodePointer()};
    };
    const bool with_accumulators_;
    std::vector<at::Tensor> leaves_;
    std::vector<Kept> kept_;
};

}  // namespace te_graph::graphs
