// How torch owns autograd nodes: std::shared_ptr up to some release after 2.11, c10::intrusive_ptr later.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace te_graph {

using NodePointer = decltype(torch::autograd::Edge::function);
using WeakNodePointer = decltype(torch::autograd::AutogradMeta::grad_accumulator_);

// A node of class T and the pointer that autograd takes it by. A template, so that only the branch of this torch is
// compiled.
template <typename T, typename Pointer = NodePointer, typename... Args>
std::pair<T*, Pointer> make_node(Args&&... args) {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
        auto* const node = new T(std::forward<Args>(args)...);
        return {node, Pointer(node, [](auto* pointer) { deleteNode(pointer); })};
    } else {
        auto node = c10::make_intrusive<T>(std::forward<Args>(args)...);
        T* const raw = node.get();
        return {raw, Pointer(std::move(node))};
    }
}

}  // namespace te_graph
