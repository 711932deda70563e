#include "common/math_bits.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "common/arguments_apart.h"
#include "common/check.h"
#include "common/note_writes.h"

namespace te_graph {
namespace {

std::string name_of(const c10::FunctionSchema& schema) { return schema.name().substr(schema.name().find("::") + 2); }

// tensor: [...].
bool has_bit(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

// tensor: [...] -> [...]. Both bits at once: what is left has none, and passes the other kernel by.
at::Tensor without_bits(const at::Tensor& tensor) { return tensor.clone().resolve_conj().resolve_neg(); }

// places: [...] each, all that `op` writes. Copies would hide that two of them share memory.
void check_places_apart(const std::string& op, const std::vector<at::Tensor>& places) {
    for (const at::Tensor& place : places) {
        if (!has_bit(place)) continue;
        for (const at::Tensor& other : places) {
            TORCH_CHECK_VALUE(&other == &place || !share_memory(place, other), op, ": expected what it writes ",
                              "to be apart, got two that share memory, one of them still to be negated or conjugated");
        }
    }
}

void call_with_math_bits(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const c10::FunctionSchema& schema = op.schema();
    const size_t first = stack->size() - schema.arguments().size();
    std::vector<std::pair<at::Tensor, at::Tensor>> written;  // and what is written in its place
    std::vector<at::Tensor> places;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const c10::Argument& argument = schema.arguments()[i];
        const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        c10::IValue& value = stack->at(first + i);
        if (value.isTensor()) {
            const at::Tensor tensor = value.toTensor();
            if (is_written && tensor.defined()) places.push_back(tensor);
            if (!tensor.defined() || !has_bit(tensor)) continue;
            if (is_written) check_writable(name_of(schema).c_str(), argument.name().c_str(), tensor);
            value = without_bits(tensor);
            if (is_written) written.emplace_back(tensor, value.toTensor());
        } else if (value.isTensorList()) {
            // A new list: the caller may hold this one.
            std::vector<at::Tensor> list = value.toTensorVector();
            if (is_written) places.insert(places.end(), list.begin(), list.end());
            for (size_t j = 0; j < list.size(); ++j) {
                if (!list[j].defined() || !has_bit(list[j])) continue;
                TORCH_CHECK_VALUE(!is_written, name_of(schema), ": expected ", argument.name(), "[", j,
                                  "] that is materialized, got one that is negated or conjugated lazily; use "
                                  "resolve_neg()");
                list[j] = without_bits(list[j]);
            }
            value = std::move(list);
        }
    }
    if (!written.empty()) check_places_apart(name_of(schema), places);
    constexpr c10::DispatchKeySet kBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    op.redispatchBoxed(keys - kBits, stack);
    for (const auto& [tensor, copy] : written) {
        tensor.copy_(copy);
        note_write(tensor);  // the copy is made below autograd
    }
}

}  // namespace

torch::CppFunction with_math_bits() { return torch::CppFunction::makeFromBoxedFunction<&call_with_math_bits>(); }

}  // namespace te_graph
