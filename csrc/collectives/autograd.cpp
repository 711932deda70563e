// Gradients of the collectives, for a loss that is the sum of all ranks' losses.
//
//     all_reduce       the sum of the ranks' gradients
//     reduce_scatter   all_gather
//     all_gather       reduce_scatter
//
// Tangents of forward-mode differentiation are sent by a call of their own, like their primals: x has one on all ranks
// or on none. Forms that write into a given tensor have no derivatives, and reject tensors that need one.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>
#include <initializer_list>

#include "common/check.h"
#include "common/no_derivative.h"
#include "common/own_op.h"

namespace te_graph::collectives {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x [...] -> [...].
at::Tensor call_all_reduce(const at::Tensor& x, std::string group, std::string reduction) {
    static const auto op = own_op<at::Tensor(const at::Tensor&, std::string, std::string)>("te_graph::all_reduce");
    return op.call(x, group, reduction);
}
// x [..., world * n, ...] -> [..., n, ...].
at::Tensor call_reduce_scatter(const at::Tensor& x, int64_t dim, int64_t world_size, std::string group,
                               std::string reduction) {
    static const auto op =
        own_op<at::Tensor(const at::Tensor&, int64_t, int64_t, std::string, std::string)>("te_graph::reduce_scatter");
    return op.call(x, dim, world_size, group, reduction);
}
// x [..., n, ...] -> [..., world * n, ...].
at::Tensor call_all_gather(const at::Tensor& x, int64_t dim, int64_t world_size, std::string group) {
    static const auto op = own_op<at::Tensor(const at::Tensor&, int64_t, int64_t, std::string)>("te_graph::all_gather");
    return op.call(x, dim, world_size, group);
}

void check_differentiable(const char* op, std::string reduction) {
    TORCH_CHECK_NOT_IMPLEMENTED(reduction == "sum", op, ": '", reduction,
                                "' has no gradient; detach x, or call it under torch.no_grad()");
}

struct AllReduce : torch::autograd::Function<AllReduce> {
    // x [...] -> [...].
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::string group) {
        const at::AutoDispatchBelowADInplaceOrView below;
        context->saved_data["group"] = group;
        return call_all_reduce(x, group, "sum");
    }
    // gradients [...] of the result -> [...] of x.
    static variable_list backward(AutogradContext* context, const variable_list& gradients) {
        return {call_all_reduce(gradients[0], context->saved_data["group"].toStringRef(), "sum"), at::Tensor()};
    }
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
    // x [..., world * n, ...] -> [..., n, ...].
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t dim, int64_t world_size,
                              std::string group) {
        const at::AutoDispatchBelowADInplaceOrView below;
        context->saved_data["group"] = group;
        context->saved_data["dim"] = dim;
        context->saved_data["world_size"] = world_size;
        return call_reduce_scatter(x, dim, world_size, group, "sum");
    }
    // gradients [..., n, ...] of the result -> [..., world * n, ...] of x.
    static variable_list backward(AutogradContext* context, const variable_list& gradients) {
        auto& saved = context->saved_data;
        return {call_all_gather(gradients[0], saved["dim"].toInt(), saved["world_size"].toInt(),
                                saved["group"].toStringRef()),
                at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

struct AllGather : torch::autograd::Function<AllGather> {
    // x [..., n, ...] -> [..., world * n, ...].
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t dim, int64_t world_size,
                              std::string group) {
        const at::AutoDispatchBelowADInplaceOrView below;
        context->saved_data["group"] = group;
        context->saved_data["dim"] = dim;
        context->saved_data["world_size"] = world_size;
        return call_all_gather(x, dim, world_size, group);
    }
    // gradients [..., world * n, ...] of the result -> [..., n, ...] of x.
    static variable_list backward(AutogradContext* context, const variable_list& gradients) {
        auto& saved = context->saved_data;
        return {call_reduce_scatter(gradients[0], saved["dim"].toInt(), saved["world_size"].toInt(),
                                    saved["group"].toStringRef(), "sum"),
                at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

// x: [...].
bool needs_gradient(const at::Tensor& x) { return at::GradMode::is_enabled() && x.requires_grad(); }
// x: [...].
bool needs_derivative(const at::Tensor& x) { return needs_gradient(x) || has_tangent(x); }

// An op that is linear, of x [...] with a tangent: the op of both. All ranks must have one, as all must call the op.
template <typename Function>
at::Tensor with_tangent(const at::Tensor& x, const Function& op) {
    const at::Tensor tangent = x._fw_grad(0);
    if (!tangent.defined()) return op(x);
    const at::Tensor result = op(x._fw_primal(0));
    result._set_fw_grad(op(tangent), 0, false);
    return result;
}

// tensors: [...] each.
void check_no_gradient(const char* op, std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
    for (const at::Tensor& tensor : tensors) {
        TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(tensor), op,
                                    ": has no forward-mode derivative, and a tensor with a tangent was given; call the "
                                    "form that returns a new tensor");
        TORCH_CHECK_NOT_IMPLEMENTED(!needs_gradient(tensor), op,
                                    ": has no gradient, and a tensor that needs one was given; call the form that "
                                    "returns a new tensor, or call it under torch.no_grad()");
    }
}

at::Tensor all_reduce_autograd(const at::Tensor& x,  // [...]
                               std::string group, std::string reduction) {
    if (needs_derivative(x)) check_differentiable("all_reduce", reduction);
    return with_tangent(x, [&](const at::Tensor& x) {
        if (needs_gradient(x)) return AllReduce::apply(x, group);
        const at::AutoDispatchBelowADInplaceOrView below;
        return call_all_reduce(x, group, reduction);
    });
}

at::Tensor reduce_scatter_autograd(const at::Tensor& x,  // [..., world * n, ...]
                                   int64_t dim, int64_t world_size, std::string group, std::string reduction) {
    if (needs_derivative(x)) check_differentiable("reduce_scatter", reduction);
    return with_tangent(x, [&](const at::Tensor& x) {
        if (needs_gradient(x)) return ReduceScatter::apply(x, dim, world_size, group);
        const at::AutoDispatchBelowADInplaceOrView below;
        return call_reduce_scatter(x, dim, world_size, group, reduction);
    });
}

at::Tensor all_gather_autograd(const at::Tensor& x,  // [..., n, ...]
                               int64_t dim, int64_t world_size, std::string group) {
    return with_tangent(x, [&](const at::Tensor& x) {
        if (needs_gradient(x)) return AllGather::apply(x, dim, world_size, group);
        const at::AutoDispatchBelowADInplaceOrView below;
        return call_all_gather(x, dim, world_size, group);
    });
}

void all_reduce_inplace_autograd(const at::Tensor& x,  // [...]
                                 std::string group, std::string reduction) {
    check_no_gradient("all_reduce_", {x});
    static const auto op = own_op<void(const at::Tensor&, std::string, std::string)>("te_graph::all_reduce_");
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(x, group, reduction);
}

void all_reduce_out_autograd(const at::Tensor& out,  // [...]
                             const at::Tensor& x,    // [...]
                             std::string group, std::string reduction, double scale,
                             const MaybeTensor& scale_tensor,  // [] or [1]
                             std::optional<at::ScalarType> wire_dtype) {
    check_no_gradient("all_reduce_out", {out, x});
    if (scale_tensor) check_no_gradient("all_reduce_out", {*scale_tensor});
    static const auto op = own_op<void(const at::Tensor&, const at::Tensor&, std::string, std::string, double,
                                       const MaybeTensor&, std::optional<at::ScalarType>)>("te_graph::all_reduce_out");
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(out, x, group, reduction, scale, scale_tensor, wire_dtype);
}

void reduce_scatter_out_autograd(const at::Tensor& out,  // [..., n, ...]
                                 const at::Tensor& x,    // [..., world * n, ...]
                                 int64_t dim, int64_t world_size, std::string group, std::string reduction,
                                 double scale,
                                 const MaybeTensor& scale_tensor,  // [] or [1]
                                 std::optional<at::ScalarType> wire_dtype) {
    check_no_gradient("reduce_scatter_out", {out, x});
    if (scale_tensor) check_no_gradient("reduce_scatter_out", {*scale_tensor});
    static const auto op =
        own_op<void(const at::Tensor&, const at::Tensor&, int64_t, int64_t, std::string, std::string, double,
                    const MaybeTensor&, std::optional<at::ScalarType>)>("te_graph::reduce_scatter_out");
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(out, x, dim, world_size, group, reduction, scale, scale_tensor, wire_dtype);
}

void all_gather_out_autograd(const at::Tensor& out,  // [..., world * n, ...]
                             const at::Tensor& x,    // [..., n, ...]
                             int64_t dim, int64_t world_size, std::string group) {
    check_no_gradient("all_gather_out", {out, x});
    static const auto op =
        own_op<void(const at::Tensor&, const at::Tensor&, int64_t, int64_t, std::string)>("te_graph::all_gather_out");
    const at::AutoDispatchBelowADInplaceOrView below;
    op.call(out, x, dim, world_size, group);
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    m.impl("all_reduce", all_reduce_autograd);
    m.impl("reduce_scatter", reduce_scatter_autograd);
    m.impl("all_gather", all_gather_autograd);
    m.impl("all_reduce_", all_reduce_inplace_autograd);
    m.impl("all_reduce_out", all_reduce_out_autograd);
    m.impl("reduce_scatter_out", reduce_scatter_out_autograd);
    m.impl("all_gather_out", all_gather_out_autograd);
}

}  // namespace te_graph::collectives
