// Ops of this area as what is bound to Python calls them.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "common/no_derivative.h"
#include "common/own_op.h"

namespace te_graph::multi_tensor {

// Calls an op through the dispatcher, so that dispatch modes see it, but past autograd, which would box every tensor.
// Tangents are refused as by autograd's kernel; tensors that are written are for the caller to look at.
template <typename Result, typename... Arguments>
class DispatchedOp {
public:
    explicit DispatchedOp(const char* name) : handle_(own_op<Result(Arguments...)>(name)) {}
    Result operator()(Arguments... arguments) const {
        if (is_forward_mode()) {
            size_t i = 0;
            (check_no_tangent(i++, arguments), ...);
        }
        const at::AutoDispatchBelowADInplaceOrView guard;
        return handle_.call(std::forward<Arguments>(arguments)...);
    }

private:
    // tensor: [...].
    void check_no_tangent(size_t i, const at::Tensor& tensor) const {
        const c10::FunctionSchema& schema = handle_.schema();
        const char* const name = schema.name().c_str() + schema.name().find("::") + 2;
        te_graph::check_no_tangent(name, schema.arguments()[i].name().c_str(), tensor);
    }
    // tensors: [...] each.
    void check_no_tangent(size_t i, at::TensorList tensors) const {
        for (const at::Tensor& tensor : tensors) check_no_tangent(i, tensor);
    }
    // tensor: [...].
    void check_no_tangent(size_t i, const std::optional<at::Tensor>& tensor) const {
        if (tensor) check_no_tangent(i, *tensor);
    }
    template <typename T>
    void check_no_tangent(size_t, const T&) const {}

    c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

}  // namespace te_graph::multi_tensor
