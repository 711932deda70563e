#include "collectives/in_backward.h"

#include <torch/csrc/autograd/graph_task.h>

namespace te_graph::collectives {
namespace {

thread_local std::optional<bool> as_captured;

}  // namespace

bool is_in_backward() { return as_captured.value_or(torch::autograd::get_current_graph_task_id() != -1); }

void set_in_backward(std::optional<bool> captured) { as_captured = captured; }

}  // namespace te_graph::collectives
