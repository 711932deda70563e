#include "flat/backwards.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace te_graph::flat {
namespace {

using torch::autograd::variable_list;

// Enters the backward around one that has ended inside of it.
struct EnterOuter final : torch::autograd::FunctionPostHook {
    explicit EnterOuter(std::function<void()> enter) : enter(std::move(enter)) {}
    variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
        enter();
        return outputs;
    }
    const std::function<void()> enter;
};

}  // namespace

void Backwards::enter(size_t gradient, const std::string& name) {
    begin(torch::autograd::get_current_graph_task_id());
    flush_received();
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(
        buckets_.may_write(gradient), "FlatParameters: the gradient of ", name,
        " is accumulated more often in this backward than in those before, and its bucket is being reduced: make "
        "it with overlap=False where that varies");
}

void Backwards::begin(int64_t task) {
    if (last_ == task) return;
    bool is_alone = false;
    {
        const std::lock_guard lock(mutex_);
        if (!tasks_.insert(task).second) return;
        last_ = task;
        is_alone = tasks_.size() == 1;
        // With another one under way, or one that has failed, it is not known what belongs to which.
        if (!is_alone) buckets_.stop();
    }
    torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
        if (const auto self = weak.lock()) self->leave(task);
    });
    const bool reduces = calls_.begin();
    if (!is_alone) return;
    const std::lock_guard lock(mutex_);
    received_.clear();
    stream_.reset();
    reduces_ = reduces;
    buckets_.begin(reduces && tasks_.size() == 1);
}

void Backwards::leave(int64_t task) {
    bool is_alone = false;
    {
        const std::lock_guard lock(mutex_);
        is_alone = tasks_.size() == 1;
        tasks_.erase(task);
        if (last_ == task) last_ = -1;
    }
    // A checkpoint of the reentrant kind runs a backward inside a node of another one, whose end is awaited.
    if (const auto node = torch::autograd::get_current_node()) {
        node->add_post_hook(std::make_unique<EnterOuter>([weak = weak_from_this()] {
            if (const auto self = weak.lock()) self->begin(torch::autograd::get_current_graph_task_id());
        }));
        return;
    }
    size_t first = 0;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& [thread, received] : std::exchange(received_, {})) buckets_.note_accumulated(received.first);
        first = buckets_.end(/*learns=*/is_alone && reduces_);
    }
    calls_.end(first);
}

void Backwards::note_accumulated(size_t gradient, int64_t stream) {
    {
        const std::lock_guard lock(mutex_);
        // The engine has the end of the backward wait for all streams; before, none is known to wait for another.
        if (stream_.value_or(stream) != stream) buckets_.stop();
        stream_ = stream;
        buckets_.note_accumulated(gradient);
    }
    tell_ready();
}

void Backwards::note_received(size_t gradient, int64_t stream) {
    const std::lock_guard lock(mutex_);
    received_[std::this_thread::get_id()] = {gradient, stream};
}

bool Backwards::looks_early() const {
    const std::lock_guard lock(mutex_);
    return buckets_.looks_early();
}

void Backwards::flush_received() {
    std::pair<size_t, int64_t> received;
    {
        const std::lock_guard lock(mutex_);
        const auto found = received_.find(std::this_thread::get_id());
        if (found == received_.end()) return;
        received = found->second;
        received_.erase(found);
    }
    note_accumulated(received.first, received.second);
}

void Backwards::tell_ready() {
    while (true) {
        size_t bucket = 0;
        {
            const std::lock_guard lock(mutex_);
            if (!buckets_.take_next(bucket)) return;
        }
        calls_.ready(bucket);
    }
}

}  // namespace te_graph::flat
