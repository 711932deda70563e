#include "common/no_derivative.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string>

namespace te_graph {
namespace {

using torch::autograd::collect_next_edges;
using torch::autograd::NotImplemented;

template <typename Function>  // (index of the value, tensor)
void for_each_tensor(c10::ArrayRef<c10::IValue> values, const Function& function) {
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i].isTensor()) {
            function(i, values[i].toTensor());
        } else if (values[i].isTensorList()) {
            for (const c10::IValue& item : values[i].toListRef()) function(i, item.toTensor());
        }
    }
}

void call_without_derivative(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const c10::FunctionSchema& schema = op.schema();
    // Without a namespace.
    const char* const name = schema.name().c_str() + schema.name().find("::") + 2;
    std::vector<const at::Tensor*> followed;
    for_each_tensor(torch::jit::last(*stack, schema.arguments().size()), [&](size_t i, const at::Tensor& tensor) {
        const c10::Argument& argument = schema.arguments()[i];
        const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        if (check_not_followed(name, argument.name().c_str(), tensor, is_written)) followed.push_back(&tensor);
    });
    std::shared_ptr<NotImplemented> node;
    if (!followed.empty()) {
        node = std::shared_ptr<NotImplemented>(new NotImplemented(schema.name()), torch::autograd::deleteNode);
        node->set_next_edges(collect_next_edges(followed));
    }
    {
        const at::AutoDispatchBelowADInplaceOrView below;
        op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    if (!node) return;
    for_each_tensor(torch::jit::last(*stack, schema.returns().size()), [&](size_t, const at::Tensor& result) {
        if (torch::autograd::isDifferentiableType(result.scalar_type())) torch::autograd::set_history(result, node);
    });
}

}  // namespace

void check_no_tangent(const char* op, const char* argument, const at::Tensor& tensor) {
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(tensor), op, ": has no forward-mode derivative, and ", argument,
                                " has a tangent; give it the primal");
}

bool check_not_followed(const char* op, const char* argument, const at::Tensor& tensor, bool is_written) {
    check_no_tangent(op, argument, tensor);
    if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return false;
    TORCH_CHECK_NOT_IMPLEMENTED(!is_written, op, ": has no gradient, and ", argument,
                                ", which it writes, requires one; call it under torch.no_grad() or give it "
                                "tensor.detach()");
    return true;
}

torch::CppFunction no_derivative() { return torch::CppFunction::makeFromBoxedFunction<&call_without_derivative>(); }

}  // namespace te_graph
