// Hooks on leaves: who has them, and how to keep them quiet while gradients are captured.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>
#include <vector>

namespace te_graph::graph {

// True when something would run if autograd accumulated into `leaf`: tensor hooks, post-accumulate-grad hooks, or hooks
// on its AccumulateGrad node, where DistributedDataParallel has its own (Python cannot see those).
bool has_gradient_hooks(const at::Tensor& leaf);

// Takes the tensor hooks off leaves for as long as it lives. torch.autograd.grad runs them on the gradients that it
// returns; a capture must not, because autograd will run them on the replayed gradient.
class HookSuspension {
public:
    explicit HookSuspension(std::vector<at::Tensor> leaves);
    ~HookSuspension() { restore(); }
    HookSuspension(const HookSuspension&) = delete;
    HookSuspension& operator=(const HookSuspension&) = delete;
    void restore();

private:
    std::vector<at::Tensor> leaves_;
    std::vector<std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>> hooks_;
};

}  // namespace te_graph::graph
