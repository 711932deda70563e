// Ops of te_graph called from C++ through the dispatcher, so that tracers and dispatch modes see them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace te_graph {

// Signature: of the C++ function, as at::Tensor(const at::Tensor&, double). name: "te_graph::...".
template <typename Signature>
c10::TypedOperatorHandle<Signature> own_op(const char* name, const char* overload = "") {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

}  // namespace te_graph
