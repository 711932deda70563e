#include "graph/replay_node.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace te_graph::graph {

torch::autograd::variable_list ReplayNode::apply(torch::autograd::variable_list&& grads) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(lease_, "te_graph: backward of ", callable_->name(),
                " a second time: its slot has been given back. Pass retain_graph=True to the first backward.");
    TORCH_CHECK(!c10::GradMode::is_enabled(), "te_graph: ", callable_->name(),
                " does not support double backward (create_graph=True): a captured backward has no derivative. "
                "Run it eagerly for this.");
    return callable_->backward(*this, std::move(grads));
}

void ReplayNode::release_variables() {
    const std::lock_guard lock(mutex_);
    externals.clear();
    output_versions.clear();
    linked_inputs.clear();
    lease_.reset();
    predecessor_lease_.reset();
}

}  // namespace te_graph::graph
