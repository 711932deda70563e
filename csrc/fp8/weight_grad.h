// Where the product that is the gradient of a weight adds it up by itself, so that it is neither written nor read
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
#include "common/store_flag.h"

namespace te_graph::fp8 {

// What the product writes:  memory = gradient (+ memory), with the bits of AccumulateGrad. A second gradient of one
// backward is added where the first one is.
//
// In a capture that is what the capture offers. Otherwise it is .grad, where the engine would do no more than add to
// it: in a backward() of all leaves, without hooks and without a graph of the gradient, to a .grad that is contiguous
// and of the weight's dtype, or where there is none yet. It is main_grad, in such a backward, where the layer says so.
struct WeightGrad {
    // What has main_grad, and whether it is to be overwritten. [O, I] -> [O, I].
    using MainGradOf = std::function<std::pair<at::Tensor, std::shared_ptr<StoreFlag>>(const at::Tensor&)>;

    // edge: to the weight, of `sizes` [O, I] and `dtype`; grad: [..., O], what the product reads; steps: of the
    // capture, or null; main_grad_of: empty where gradients go to .grad. Nothing where they have to go through
    // autograd.
    static std::optional<WeightGrad> find(const torch::autograd::Edge& edge, at::IntArrayRef sizes,
                                          at::ScalarType dtype, const at::Tensor& grad, HostSteps* steps,
                                          const MainGradOf& main_grad_of);
    // Once the product has been launched on the current stream. What the engine gets: [O, I] or undefined.
    at::Tensor finish();

    at::Tensor memory;         // [O, I]
    bool accumulates = false;  // adds to it

private:
    enum class Holder { kCapture, kEngine, kGrad, kMainGrad };
    Holder holder_ = Holder::kCapture;
    at::Tensor weight_;                // [O, I], of kGrad
    std::shared_ptr<StoreFlag> flag_;  // of kMainGrad
    std::shared_ptr<torch::autograd::Node> accumulator_;
    std::unique_lock<std::mutex> alone_;  // as AccumulateGrad has it while it adds
};

}  // namespace te_graph::fp8
