#include "flat/backwards.h"

#include <chrono>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace te_graph::flat {
namespace {

using torch::autograd::variable_list;

// Within which a thread of the engine lets go of a task that has failed, however busy the host is.
constexpr std::chrono::seconds kUnwinding{10};

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
        "it with overlap_grad_reduce=False where that varies");
}

// What the engine holds of a task that has begun, for as long as the task lives.
class Backwards::Task {
public:
    Task(std::weak_ptr<Backwards> backwards, int64_t task) : backwards_(std::move(backwards)), task_(task) {}
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;
    // The engine calls nothing back where a backward has failed.
    ~Task() {
        if (const auto backwards = backwards_.lock()) backwards->abandon(task_);
    }
    void leave() const {
        if (const auto backwards = backwards_.lock()) backwards->leave(task_);
    }

private:
    const std::weak_ptr<Backwards> backwards_;
    const int64_t task_;
};

void Backwards::begin(int64_t task) {
    if (last_task_ == task) return;
    finish_failed();
    bool is_first = false;
    {
        const std::lock_guard lock(mutex_);
        if (!tasks_.insert(task).second) return;
        last_task_ = task;
        outer_.reset();
        is_first = !std::exchange(is_under_way_, true);
        if (is_first) {
            pending_by_thread_.clear();
            stream_.reset();
            reduces_ = false;
            buckets_.begin();
        } else {  // it is not known what belongs to which
            buckets_.stop();
        }
    }
    torch::autograd::Engine::get_default_engine().queue_callback(
        [begun = std::make_shared<Task>(weak_from_this(), task)] { begun->leave(); });
    const bool reduces = calls_.begin();
    if (!is_first) return;
    const std::lock_guard lock(mutex_);
    reduces_ = reduces;
    if (reduces && tasks_.size() == 1) buckets_.look_early();
}

void Backwards::leave(int64_t task) {
    size_t first = 0;
    {
        // A checkpoint of the reentrant kind runs a backward inside a node of another one, whose end is awaited.
        const auto outer = torch::autograd::get_current_node();
        const std::lock_guard lock(mutex_);
        erase(task);
        if (outer) {
            outer->add_post_hook(std::make_unique<EnterOuter>([weak = weak_from_this()] {
                if (const auto self = weak.lock()) self->begin(torch::autograd::get_current_graph_task_id());
            }));
            outer_ = outer;
            buckets_.stop();
        }
        if (outer || !tasks_.empty()) return;
        for (const auto& [thread, received] : std::exchange(pending_by_thread_, {}))
            buckets_.note_accumulated(received.first);
        is_under_way_ = false;
        first = buckets_.end(/*learns=*/reduces_);
    }
    calls_.end(first);
}

void Backwards::abandon(int64_t task) {
    const std::lock_guard lock(mutex_);
    if (erase(task)) outer_.reset();  // else it has left
}

bool Backwards::erase(int64_t task) {
    if (tasks_.erase(task) == 0) return false;
    if (last_task_ == task) last_task_ = -1;
    if (tasks_.empty()) no_tasks_.notify_all();
    return true;
}

void Backwards::finish_failed() {
    size_t first = 0;
    {
        std::unique_lock lock(mutex_);
        // Whoever has called a backward goes on as soon as it has failed, while the device's thread still unwinds.
        const bool is_outside = torch::autograd::get_current_graph_task_id() == -1;
        if (is_under_way_ && reduces_ && is_outside)
            no_tasks_.wait_for(lock, kUnwinding, [this] { return tasks_.empty(); });
        if (!is_under_way_ || !tasks_.empty() || !outer_.expired()) return;
        is_under_way_ = false;
        first = buckets_.end(/*learns=*/false);
        if (!reduces_) return;
    }
    calls_.fail(first);
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
    pending_by_thread_[std::this_thread::get_id()] = {gradient, stream};
}

bool Backwards::looks_early() const {
    const std::lock_guard lock(mutex_);
    return buckets_.looks_early();
}

void Backwards::flush_received() {
    std::pair<size_t, int64_t> received;
    {
        const std::lock_guard lock(mutex_);
        const auto found = pending_by_thread_.find(std::this_thread::get_id());
        if (found == pending_by_thread_.end()) return;
        received = found->second;
        pending_by_thread_.erase(found);
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
