#include "fp8/parameter_grad.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/Event.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <tuple>

#include "common/arguments_apart.h"
#include "common/current_stream.h"
#include "common/grad_view.h"
#include "common/leaf.h"

namespace te_graph::fp8 {
namespace {

using torch::autograd::AccumulateGrad;

// Its mutex, which is not public.
struct Locked : AccumulateGrad {
    static std::mutex& mutex_of(AccumulateGrad& node) { return node.*(&Locked::mutex_); }
};

// Whether this backward is for all leaves, and its gradients are not followed.
bool is_plain_backward() {
    const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
    return !at::GradMode::is_enabled() && (asked == nullptr || asked->empty());
}

// tensor: [sizes], if it is so.
bool is_plain(const at::Tensor& tensor, at::IntArrayRef sizes, at::ScalarType dtype) {
    return tensor.layout() == at::kStrided && tensor.scalar_type() == dtype && tensor.sizes() == sizes &&
           tensor.is_contiguous() && !tensor.is_inference() && !tensor.key_set().has(c10::DispatchKey::Python);
}

// Whether what writes at multiples of so many bytes can write to tensor [...].
bool is_aligned(const at::Tensor& tensor, size_t alignment) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % alignment == 0;
}

// main_grad: [...], of a parameter of `sizes`.
void check_main_grad(const at::Tensor& main_grad, at::IntArrayRef sizes, size_t alignment, at::Device device) {
    const at::ScalarType dtype = main_grad.scalar_type();
    const bool is_wide = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
    TORCH_CHECK_VALUE(
        is_wide && is_plain(main_grad, sizes, dtype) && main_grad.device() == device,
        "te_graph.Linear: expected weight.main_grad, to which fuse_wgrad_accumulation adds, contiguous, of ",
        "float32, bfloat16 or float16 and of shape ", sizes, " on ", device, ", got ", main_grad.toString(),
        " of shape ", main_grad.sizes(), " and strides ", main_grad.strides(), " on ", main_grad.device());
    TORCH_CHECK_VALUE(is_aligned(main_grad, alignment), "te_graph.Linear: expected weight.main_grad, to which ",
                      "fuse_wgrad_accumulation adds, at a multiple of ", alignment,
                      " bytes, got one elsewhere: round offsets in a flat buffer up");
}

// What is added to this, [sizes], keeps its bits: x + -0.0 has those of x for every x.
at::Tensor negative_zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
    return at::full(sizes, -0.0, options);
}

// What comes on stream `later` does so after what is on `earlier` by now.
void order(const c10::Stream& earlier, const c10::Stream& later) {
    if (earlier == later) return;
    c10::Event event(earlier.device_type());
    event.record(earlier);
    later.wait(event);
}

}  // namespace

std::optional<ParameterGrad> ParameterGrad::find(const torch::autograd::Edge& edge, at::IntArrayRef sizes,
                                                 at::ScalarType dtype, size_t alignment, const at::Tensor& grad,
                                                 HostSteps* steps, const MainGradOf& main_grad_of) {
    auto* const node = dynamic_cast<AccumulateGrad*>(edge.function.get());
    if (node == nullptr || !is_plain(node->variable, sizes, dtype)) return std::nullopt;
    const at::Tensor& parameter = node->variable;
    if (!parameter.requires_grad()) return std::nullopt;  // frozen since the forward: the engine drops the gradient
    ParameterGrad result;
    if (steps != nullptr) {
        if (auto buffer = steps->grad_buffers().request(parameter, main_grad_of != nullptr)) {
            result.memory = *std::move(buffer);
            result.accumulate = true;
            return result;
        }
    }
    const torch::autograd::AutogradMeta* const meta = autograd_meta_of(parameter);
    const bool is_plain_here =
        is_plain_backward() && !has_gradient_hooks(*meta) && meta->grad_dtype_.value_or(dtype) == dtype;
    if (!is_plain_here && steps == nullptr) return std::nullopt;
    GradView* const view = grad_view_of(*meta);
    if (view && view->main_grad_reset() && !main_grad_of) return std::nullopt;  // autograd adds it to main_grad
    at::Tensor main_grad;
    if (main_grad_of) {
        std::tie(main_grad, result.reset_) = main_grad_of(parameter);
        check_main_grad(main_grad, sizes, alignment, parameter.device());
        dtype = main_grad.scalar_type();
    }
    if (!is_plain_here) {
        // A warm-up, which computes as the capture will: then a kernel has been chosen for that.
        result.memory = negative_zeros(sizes, grad.options().dtype(dtype));
        result.accumulate = true;
        result.holder_ = Holder::kEngine;
        return result;
    }
    TORCH_CHECK(!main_grad_of || steps == nullptr,
                "te_graph.Linear: with fuse_wgrad_accumulation no backward can be captured inside a function, which "
                "would not see reset_main_grads: graph the layers instead, with make_graphed_callables");
    if (view) view->enter_backward();
    result.alone_ = std::unique_lock(Locked::mutex_of(*node));
    result.accumulator_ = edge.function;
    // Another use of the parameter may have been added on another stream: each waits for that of AccumulateGrad, which
    // waits for each, and the engine has the end of the backward wait for it.
    if (const auto stream = node->stream()) order(*stream, current_stream(stream->device()));
    if (main_grad_of) {
        result.holder_ = Holder::kMainGrad;
        result.memory = std::move(main_grad);
        result.accumulate = !result.reset_->is_pending;
        return result;
    }
    const at::Tensor& there = parameter.grad();
    if (there.defined() && (!is_plain(there, sizes, dtype) || !is_aligned(there, alignment) ||
                            there.device() != grad.device() || there.requires_grad() || share_memory(there, grad))) {
        return std::nullopt;
    }
    result.holder_ = Holder::kGrad;
    result.memory = there.defined() ? there : view ? view->renew() : at::empty(sizes, grad.options().dtype(dtype));
    result.accumulate = there.defined();
    result.parameter_ = parameter;
    return result;
}

at::Tensor ParameterGrad::finish() {
    if (holder_ == Holder::kEngine) return memory;
    if (holder_ == Holder::kCapture) return {};
    if (holder_ == Holder::kGrad && !accumulate) parameter_.mutable_grad() = memory;
    if (holder_ == Holder::kMainGrad) reset_->is_pending = false;
    if (const auto stream = accumulator_->stream()) {
        const c10::Stream current = current_stream(stream->device());
        if (current != *stream) memory.record_stream(*stream);
        order(current, *stream);
    }
    return {};
}

}  // namespace te_graph::fp8
