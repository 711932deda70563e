// Where the op that computes the gradient of a parameter adds it up by itself, so that it is neither written nor read
// again.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "common/host_steps.h"
#include "common/main_grad_reset.h"

namespace te_graph::fp8 {

// What the op writes:  memory = gradient (+ memory), with the bits of AccumulateGrad. A second gradient of one backward
// is added where the first one is.
//
// In a capture that is what the capture offers. Otherwise it is .grad, where the engine would do no more than add to
// it: in a backward() of all leaves, without hooks and without a graph of the gradient, to a .grad that is contiguous
// and of the parameter's dtype, or where there is none yet. It is main_grad, in such a backward, where the layer says
// so.
struct ParameterGrad {
    // What has main_grad, and whether it is to be overwritten. [...] -> [...].
    using MainGradOf = std::function<std::pair<at::Tensor, std::shared_ptr<MainGradReset>>(const at::Tensor&)>;

    // edge: to the parameter, of `sizes` and `dtype`; alignment: of what the op can write to, in bytes; grad: [..., O],
    // what the op reads; steps: of the capture, or null; main_grad_of: empty where gradients go to .grad. Nothing where
    // they have to go through autograd.
    static std::optional<ParameterGrad> find(const torch::autograd::Edge& edge, at::IntArrayRef sizes,
                                             at::ScalarType dtype, size_t alignment, const at::Tensor& grad,
                                             HostSteps* steps, const MainGradOf& main_grad_of);
    // Once the op has been launched on the current stream. What the engine gets: [sizes] or undefined.
    at::Tensor finish();

    at::Tensor memory;        // [sizes]
    bool accumulate = false;  // adds to it

private:
    enum class Holder { kCapture, kEngine, kGrad, kMainGrad };
    Holder holder_ = Holder::kCapture;
    at::Tensor parameter_;                  // [sizes], of kGrad
    std::shared_ptr<MainGradReset> reset_;  // of kMainGrad
    std::shared_ptr<torch::autograd::Node> accumulator_;
    std::unique_lock<std::mutex> alone_;  // as AccumulateGrad has it while it adds
};

}  // namespace te_graph::fp8
