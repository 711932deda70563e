#include "fp8/linear_backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace te_graph::fp8 {

using torch::autograd::variable_list;

void LinearBackward::release_variables() {
    const std::lock_guard lock(mutex_);
    product_.release();
    is_released_ = true;
}

variable_list LinearBackward::apply(variable_list&& gradients) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
    if (!gradients[0].defined()) return variable_list(3);
    // Gradients of gradients also pass through x and the weight, whose casts have none: results say so when one is
    // asked of them, whether or not they are recorded for the sake of the gradient.
    const bool must_be_followed = at::GradMode::is_enabled() && !gradients[0].requires_grad();
    const at::Tensor grad = must_be_followed ? gradients[0].detach().requires_grad_() : gradients[0];
    const std::array<bool, 3> mask{task_should_compute_output(0), task_should_compute_output(1),
                                   task_should_compute_output(2)};
    ProductBackward::Run run = product_.begin();
    // Where nothing is followed, autograd's part, some of the call's time on the host, is left out.
    const bool is_followed = at::GradMode::is_enabled();
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!is_followed) below.emplace();
    if (!is_followed && !is_looked_at(*this)) {
        product_.find_memory(run, grad, mask[1] ? &next_edge(1) : nullptr, mask[2] ? &next_edge(2) : nullptr);
    }
    auto [grad_x, grad_weight, grad_bias] = product_.multiply(run, grad, x_dtype_, mask);
    auto [of_weight, of_bias] = product_.end(run, std::move(grad_weight), std::move(grad_bias));
    return {std::move(grad_x), std::move(of_weight), std::move(of_bias)};
}

}  // namespace te_graph::fp8
