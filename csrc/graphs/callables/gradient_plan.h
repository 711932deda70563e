// What one backward replay does with the gradient of one parameter. No Torch here.
#pragma once

#include <cstddef>
#include <vector>

namespace te_graph::graphs {

// True when one place is set in both of `a` and `b`, of one length.
inline bool any_common(const std::vector<bool>& a, const std::vector<bool>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i] && b[i]) return true;
    }
    return false;
}

// What is known of a parameter when the backward is about to be replayed.
struct GradientSituation {
    bool reached = true;               // an output that it depends on got a gradient
    bool inputs_only = false;          // torch.autograd.grad or backward(inputs=...): no .grad may change
    bool through_autograd = false;     // autograd has an edge to it: hooks, shared, or accumulate_grads=False
    bool hooked_since = false;         // it has hooks, but had none when the edges were made
    bool frozen_since = false;         // it no longer requires a gradient: accumulating would do nothing
    bool has_main_grad = false;        // gradients go to main_grad and .grad stays None
    bool main_grad_fits = true;        // main_grad has a layout and dtype that the graph can write
    bool overwrite_main_grad = false;  // reset_main_grads() was called since the last backward
    bool has_grad = false;             // .grad is a tensor
    bool grad_fits = false;            // .grad has the layout, dtype and device that the graph writes
};

enum class GradientAction {
    kNothing,               // leave .grad as it is
    kReturn,                // give autograd a tensor of its own
    kCallHooks,             // do what autograd would have done with an edge
    kStoreNew,              // write into a buffer that becomes .grad
    kAddInPlace,            // add into the tensor that .grad is
    kAddEagerly,            // .grad exists but the table cannot write it: add with an ordinary op after the replay
    kStoreMainGrad,         // overwrite main_grad
    kAddMainGrad,           // add into main_grad
    kStoreMainGradEagerly,  // the same by an ordinary op after the replay
    kAddMainGradEagerly,
};

// True for what writes to the gradient without autograd.
constexpr bool accumulates(GradientAction action) {
    return action != GradientAction::kNothing && action != GradientAction::kReturn &&
           action != GradientAction::kCallHooks;
}

constexpr GradientAction decide_gradient(const GradientSituation& now) {
    if (!now.reached) return GradientAction::kNothing;
    if (now.through_autograd) return GradientAction::kReturn;
    if (now.inputs_only) return GradientAction::kNothing;
    if (now.hooked_since) return GradientAction::kCallHooks;
    if (now.frozen_since) return GradientAction::kNothing;
    if (now.has_main_grad) {
        if (!now.main_grad_fits) {
            return now.overwrite_main_grad ? GradientAction::kStoreMainGradEagerly
                                           : GradientAction::kAddMainGradEagerly;
        }
        return now.overwrite_main_grad ? GradientAction::kStoreMainGrad : GradientAction::kAddMainGrad;
    }
    if (!now.has_grad) return GradientAction::kStoreNew;
    return now.grad_fits ? GradientAction::kAddInPlace : GradientAction::kAddEagerly;
}

}  // namespace te_graph::graphs
