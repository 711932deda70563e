// The memory in which ops of a backward add up gradients by themselves: what is in it before a replay, and who has it.
#include <ATen/core/grad_mode.h>

#include "common/run_on.h"
#include "graphs/callables/callable.h"
#include "graphs/callables/negative_zeros.h"

namespace te_graph::graphs {

// Whether `tensor` is the buffer of the parameter.
bool GraphedCallable::is_grad_buffer(size_t parameter, const at::Tensor& tensor) const {
    return parameters_[parameter].has_grad_buffer && has_memory(tensor) &&
           tensor.const_data_ptr() == slots_.front()->parameter_grads[parameter].const_data_ptr();
}

// The buffer is about to be overwritten: who holds what is or has been .grad there keeps its values.
void GraphedCallable::protect_grad_buffer(const PendingBackward& pending, size_t parameter) {
    if (GradView* const view = grad_view_of((*pending.externals)[parameters_[parameter].tensor])) view->protect();
    lent_buffers_[parameter]->protect();
}

// A new .grad over the buffer of the parameter. Who holds an earlier one keeps its values.
at::Tensor GraphedCallable::lend_grad_buffer(size_t parameter) {
    lent_buffers_[parameter]->protect();
    return StaticTensors({slots_.front()->parameter_grads[parameter]}).lend(*lent_buffers_[parameter]).front();
}

// Puts into the buffers what is to be added to: what is there, what .grad has elsewhere, or nothing.
void GraphedCallable::prepare_grad_buffers(const PendingBackward& pending) {
    const at::NoGradGuard no_grad;
    Slot& slot = slot_of(pending);
    std::vector<NegativeZeros> nothing;
    for (const size_t i : buffered_) {
        const at::Tensor& buffer = slots_.front()->parameter_grads[i];
        const at::Tensor& tensor = destination(pending, i);
        const GradientAction action = slot.updates[i].action;
        const bool is_in_place = tensor.defined() && is_grad_buffer(i, tensor);
        if (!is_in_place) protect_grad_buffer(pending, i);
        // A main_grad that is not to change is written all the same.
        const bool is_kept = !is_in_place && parameters_[i].main_grad >= 0;
        slot.updates[i].kept = is_kept ? buffer.clone() : at::Tensor();
        if (action == GradientAction::kAddInPlace || action == GradientAction::kAddMainGrad) {
            if (!is_in_place) buffer.copy_(tensor);
        } else if (action != GradientAction::kNothing) {
            nothing.push_back({buffer.mutable_data_ptr(), static_cast<int64_t>(buffer.nbytes()),
                               negative_zero_word(buffer.element_size())});
        }
    }
    if (nothing.empty()) return;
    TE_GRAPH_RUN(device_, fill_negative_zeros, nothing.data(), static_cast<int64_t>(nothing.size()));
}

// Once the graph has run, and what was to be done with the gradients is done.
void GraphedCallable::restore_main_grads(const PendingBackward& pending) {
    for (const size_t i : buffered_) {
        at::Tensor& kept = slot_of(pending).updates[i].kept;
        if (!kept.defined()) continue;
        const at::AutoDispatchBelowADInplaceOrView unseen;  // nothing has changed: neither has the version
        main_grad_of(pending, i).copy_(std::exchange(kept, {}));
    }
}

}  // namespace te_graph::graphs
