// Ops of this area as what is bound to Python calls them.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "common/own_op.h"

namespace te_graph::multi_tensor {

// Calls an op through the dispatcher, so that dispatch modes see it, but past autograd, which would box every tensor.
template <typename Result, typename... Arguments>
class DispatchedOp {
public:
    explicit DispatchedOp(const char* name) : handle_(own_op<Result(Arguments...)>(name)) {}
    Result operator()(Arguments... arguments) const {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return handle_.call(std::forward<Arguments>(arguments)...);
    }

private:
    c10::TypedOperatorHandle<Result(Arguments...)> handle_;
};

}  // namespace te_graph::multi_tensor
