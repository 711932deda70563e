#include "flat/backwards.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace te_graph::flat {
namespace {

using torch::autograd::variable_list;

// Enters the backward around one that has ended inside of it.
struct EnterOuter final : torch::autograd::FunctionPostHook {
    explicit EnterOuter(std::weak_ptr<Backwards> backwards) : backwards(std::move(backwards)) {}
    variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
        if (const auto alive = backwards.lock()) alive->enter();
        return outputs;
    }
    const std::weak_ptr<Backwards> backwards;
};

}  // namespace

void Backwards::enter() {
    const int64_t task = torch::autograd::get_current_graph_task_id();
    if (last_ == task) return;
    {
        const std::lock_guard lock(mutex_);
        if (!tasks_.insert(task).second) return;
        last_ = task;
    }
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
        if (const auto self = weak.lock()) self->leave(task);
    });
    begin_();
}

void Backwards::leave(int64_t task) {
    {
        const std::lock_guard lock(mutex_);
        tasks_.erase(task);
        if (last_ == task) last_ = -1;
    }
    // A checkpoint of the reentrant kind runs a backward inside a node of another one, whose end is awaited.
    if (const auto node = torch::autograd::get_current_node()) {
        node->add_post_hook(std::make_unique<EnterOuter>(weak_from_this()));
        return;
    }
    end_();
}

}  // namespace te_graph::flat
