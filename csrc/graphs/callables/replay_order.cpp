#include "graphs/callables/replay_order.h"

#ifdef TE_GRAPH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/engine.h>
#endif

namespace te_graph::graphs {

#ifdef TE_GRAPH_CUDA

struct ReplayOrder::LastReplay {
    std::mutex mutex;
    std::optional<c10::cuda::CUDAStream> last;
    at::cuda::CUDAEvent event;
};

ReplayOrder::ReplayOrder(at::Device device) : device_(device) {
    if (device.is_cuda()) last_replay_ = std::make_unique<LastReplay>();
}

void ReplayOrder::enter() {
    if (!last_replay_) return;
    const std::lock_guard lock(last_replay_->mutex);
    const auto current = c10::cuda::getCurrentCUDAStream(device_.index());
    if (last_replay_->last && *last_replay_->last != current) {
        last_replay_->event.record(*last_replay_->last);
        last_replay_->event.block(current);
    }
    last_replay_->last = current;
}

void sync_backward_caller(at::Device device) {
    if (!device.is_cuda()) return;
    const auto replayed_on = c10::cuda::getCurrentCUDAStream(device.index());
    // Final callbacks of the engine run on the streams that were current where backward was called.
    torch::autograd::Engine::get_default_engine().queue_callback([replayed_on] {
        const auto caller = c10::cuda::getCurrentCUDAStream(replayed_on.device_index());
        if (caller == replayed_on) return;
        at::cuda::CUDAEvent event;
        event.record(replayed_on);
        event.block(caller);
    });
}

#else

struct ReplayOrder::LastReplay {};
ReplayOrder::ReplayOrder(at::Device device) : device_(device) {}
void ReplayOrder::enter() {}
void sync_backward_caller(at::Device) {}

#endif

ReplayOrder::~ReplayOrder() = default;

void ReplayOrder::note_thread(std::atomic<const void*>& first) {
    static thread_local const char mark = 0;
    const void* before = nullptr;
    const bool is_first = first.compare_exchange_strong(before, &mark, std::memory_order_relaxed);
    if (!is_first && before != &mark) is_of_several_threads_.store(true, std::memory_order_release);
}

void ReplayOrder::enter_forward() {
    note_thread(first_forward_);
    enter();
}

std::unique_lock<std::mutex> ReplayOrder::enter_backward() {
    std::unique_lock lock(backward_);
    note_thread(first_backward_);
    enter();
    return lock;
}

}  // namespace te_graph::graphs
