#include "collectives/peer_transport.h"

#ifdef TE_GRAPH_CUDA

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>

#include "collectives/element_of.h"
#include "collectives/notice.h"
#include "collectives/stream_chain.h"
#include "collectives/watchdog.h"

namespace te_graph::collectives {
namespace {

// What a peer is at: that it is another operation, and what else is known.
std::string describe_other(const Record& record, const std::optional<Extents>& extents) {
    const OperationKind own = kind_of(record.expected), other = kind_of(record.seen);
    if (extents) return describe(Signature{other, *extents});
    if (other != own) return describe(other);
    return describe(other) + (own.op == Op::kAllReduce ? " of another size" : " of another size or dim");
}

// other: the extents of a peer's operation, where that is another one and they are known.
std::string message_of(const std::string& group, int rank, double timeout, const Record& record,
                       const std::optional<Extents>& other) {
    std::ostringstream text;
    text << "group " << group << " was given up on rank " << rank;
    if (record.expected != 0) {
        text << " in operation " << sequence_of(record.expected) << ", "
             << describe(Signature{kind_of(record.expected), record.extents});
    }
    text << ": ";
    switch (record.failure) {
        case Failure::kTimeout:
            text << "nothing came from rank " << record.peer << " within " << timeout << " s";
            break;
        case Failure::kMismatch:
            text << "rank " << record.peer << " is at " << describe_other(record, other) << " in the same place";
            break;
        case Failure::kTwoKernels:
            text << "two operations of the group ran on one GPU at the same time; order their streams, or replay "
                    "graphs that hold them on one stream";
            break;
        case Failure::kToldByPeer:
            text << "rank " << record.peer << " gave up first, its own error says why";
            break;
        default:
            text << "abort() was called";
    }
    return text.str();
}

}  // namespace

struct PeerTransport::State {
    State(std::string name, PeerMemory slab, PeerOptions wishes)
        : group(std::move(name)), memory(std::move(slab)), options(wishes), timeout(wishes.timeout) {
        const c10::cuda::CUDAGuard guard(memory.slab.device());
        {
            const c10::InferenceMode read_only;  // outside of it: users see a part
            control = at::empty({static_cast<int64_t>(sizeof(Control) / sizeof(float))},
                                memory.slab.options().dtype(at::kFloat));
            found_inf = control.select(0, offsetof(Control, failed) / sizeof(float));
        }
        record_memory =
            at::empty({static_cast<int64_t>(sizeof(Record))}, at::TensorOptions(at::kByte).pinned_memory(true));
        record = new (record_memory.data_ptr()) Record{};

        peers.rank = memory.rank;
        peers.world = static_cast<int32_t>(memory.places.size());
        slots = divide_inbox(memory.inbox_bytes, 2 * static_cast<int64_t>(peers.world - 1));
        peers.line_slot_bytes = slots.lines;
        peers.data_slot_bytes = slots.data;
        peers.flag_slot_bytes = slots.flags;
        peers.control = static_cast<Control*>(control.data_ptr());
        starts_early = can_start_early();
        for (int p = 0; p < peers.world; ++p) {
            char* const place = reinterpret_cast<char*>(memory.places[p]);
            peers.inbox[p] = peers.pool[p] = place;
        }

        // Lines of whoever had this memory before must not look like ours.
        memory.slab.narrow(0, 0, memory.inbox_bytes).zero_();
        const int64_t data = peers.data(peers.rank) - peers.inbox[peers.rank];
        memory.slab.narrow(0, data, 2 * (peers.world - 1) * slots.data).fill_(kEmptyByte);
        Control start{};
        start.state = 1ull << kSequenceShift;
        start.traps = options.traps;
        start.timeout_ns = nanoseconds(wishes.timeout);
        start.record = record;
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
        C10_CUDA_CHECK(cudaMemcpyAsync(peers.control, &start, sizeof(start), cudaMemcpyHostToDevice, stream));
        C10_CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
        C10_CUDA_CHECK(cudaDeviceSynchronize());
    }
    ~State() {
        watchdog.reset();  // whose thread may use the stream
        C10_CUDA_CHECK_WARN(cudaStreamDestroy(side));
    }

    static uint64_t nanoseconds(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

    // To the device without waiting for its kernels.
    void write(void* place, const void* value, size_t bytes) {
        const c10::cuda::CUDAGuard guard(memory.slab.device());
        C10_CUDA_CHECK(cudaMemcpyAsync(place, value, bytes, cudaMemcpyHostToDevice, side));
        C10_CUDA_CHECK(cudaStreamSynchronize(side));
    }

    // What a peer has said that its operation, which a flag is of, extends to. It says so when it gives up as well, so
    // that may be a moment later.
    std::optional<Extents> extents_told_by(int peer, uint64_t flag) const {
        using Clock = std::chrono::steady_clock;
        const auto* const place = &peers.mailbox(peers.rank)->extents[peer];
        const Clock::time_point end = Clock::now() + std::chrono::milliseconds(100);
        // Whoever asks may be in a capture. A context that has ended answers nothing, and messages are due all the same.
        try {
            const c10::cuda::CUDAGuard guard(memory.slab.device());
            const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
            do {
                Extents told{};
                C10_CUDA_CHECK(cudaMemcpyAsync(&told, place, sizeof(told), cudaMemcpyDeviceToHost, side));
                C10_CUDA_CHECK(cudaStreamSynchronize(side));
                if (fits(told, flag)) return told;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            } while (Clock::now() < end);
        } catch (const c10::Error&) {
        }
        return {};
    }

    // Why the group was given up, which it was. The same to all who ask.
    const std::string& message() {
        std::call_once(has_message, [&] {
            std::optional<Extents> other;
            if (record->failure == Failure::kMismatch) other = extents_told_by(record->peer, record->seen);
            text = message_of(group, peers.rank, timeout, *record, other);
        });
        return text;
    }

    // In its memory pool, tensors have a place that peers know.
    int64_t pool_offset_of(const char* data) const {
        const auto* const slab = static_cast<const char*>(memory.slab.const_data_ptr());
        return data >= slab && data < slab + memory.slab.nbytes() ? data - slab : -1;
    }

    void launch(const Operation& operation, cudaStream_t stream) {
        const int64_t world = peers.world;
        const auto bytes = static_cast<int64_t>(std::max(operation.input.nbytes(), operation.out.nbytes()));
        const Split split = split_of(operation.op, bytes, peers.world, slots, options.tuning);
        const auto* const input = static_cast<const char*>(operation.input.const_data_ptr());
        auto* const out = static_cast<char*>(operation.out.data_ptr());
        // Pieces of which a launch does `count` units each: of an all-reduce in two steps, one for each rank.
        const int64_t unit = unit_bytes(split.way);
        const int64_t pieces = split.steps == Steps::kReduceSend ? world : 1;
        const int64_t most = split.count * unit * pieces;
        const int64_t whole = operation.op == Op::kAllReduce ? bytes : bytes / world;
        peers.extents = operation.extents;
        for (int64_t begin = 0; begin < whole; begin += most) {
            const int64_t size = std::min(most, whole - begin);
            Job job{};
            job.count = (units_in(split.way, size) + pieces - 1) / pieces;
            job.steps = split.steps;
            job.element = element_of(operation.input.scalar_type());
            job.reduction = operation.reduction;
            job.starts_early = starts_early;
            job.signature = pack(operation.signature());
            job.launch = kLaunchIds[launches++ % kLaunchIds.size()];
            job.pool_offset = pool_offset_of(out + begin);
            switch (operation.op) {
                case Op::kReduceScatter:
                    job.input = {input + begin, bytes - begin, whole, size};
                    job.out = {out + begin, size, 0, size};
                    break;
                case Op::kAllGather:
                    job.input = {input + begin, size, 0, size};
                    job.out = {out + begin, bytes - begin, whole, size};
                    break;
                case Op::kAllReduce:
                    const int64_t piece = pieces == 1 ? size : job.count * unit;
                    const int64_t stride = pieces == 1 ? 0 : piece;
                    job.input = {input + begin, size, stride, piece};
                    job.out = {out + begin, size, stride, piece};
            }
            const bool by_tiles = split.way == Way::kTiles;
            job.blocks = (by_tiles ? tile_blocks_for : line_blocks_for)(job.count, options.tuning.blocks);
            const auto launch_by = by_tiles ? launch_tiles : split.way == Way::kWords ? launch_words : launch_lines;
            C10_CUDA_CHECK(launch_by(peers, job, stream));
        }
    }

    const std::string group;
    const PeerMemory memory;
    PeerOptions options;
    std::atomic<double> timeout;  // of the options, as it is now; messages are asked for by any thread
    at::Tensor control, record_memory;
    at::Tensor found_inf;  // [], a part of control
    Record* record;
    Peers peers{};
    SlotBytes slots{};
    bool starts_early;
    cudaStream_t side = nullptr;
    uint64_t launches = 0;
    StreamChain chain;
    std::mutex mutex;
    std::once_flag has_message;
    std::string text;  // of the message
    std::unique_ptr<Watchdog> watchdog;
};

PeerTransport::PeerTransport(std::string group, PeerMemory memory, PeerOptions options)
    : state_(std::make_unique<State>(std::move(group), std::move(memory), options)) {
    state_->watchdog = std::make_unique<Watchdog>(state_->record, options.watchdog,
                                                  [state = state_.get()] { return state->message(); });
}
PeerTransport::~PeerTransport() = default;

void PeerTransport::run(const Operation& operation) {
    check(operation.name);
    if (operation.input.numel() == 0) return;
    const std::lock_guard lock(state_->mutex);
    const c10::cuda::CUDAGuard guard(state_->memory.slab.device());
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    state_->chain.run(stream, [&] { state_->launch(operation, stream); });
}

void PeerTransport::check(const char* op) {
    if (static_cast<volatile Record*>(state_->record)->is_set == 0) return;
    is_some_group_given_up.store(true, std::memory_order_relaxed);
    state_->watchdog->acknowledge();
    TORCH_CHECK(false, op, ": ", state_->message());
}

void PeerTransport::abort() {
    const std::lock_guard lock(state_->mutex);
    auto& record = *static_cast<volatile Record*>(state_->record);
    if (record.is_set != 0) return;
    const float failed = 1;
    const int32_t claimed = 1;
    state_->write(&state_->peers.control->is_claimed, &claimed, sizeof(claimed));
    state_->write(&state_->peers.control->failed, &failed, sizeof(failed));
    record.failure = Failure::kAborted;
    record.is_set = 1;
    const uint64_t told = 1 + static_cast<uint64_t>(state_->peers.rank);
    for (int p = 0; p < state_->peers.world; ++p) {
        state_->write(&state_->peers.mailbox(p)->abort, &told, sizeof(told));
    }
}

void PeerTransport::set_timeout(double seconds) {
    const std::lock_guard lock(state_->mutex);
    state_->timeout = seconds;
    const uint64_t timeout_ns = State::nanoseconds(seconds);
    state_->write(&state_->peers.control->timeout_ns, &timeout_ns, sizeof(timeout_ns));
}

at::Tensor PeerTransport::found_inf() const { return state_->found_inf; }

void PeerTransport::set_tuning(const Tuning& tuning) {
    const std::lock_guard lock(state_->mutex);
    state_->options.tuning = tuning;
}
Tuning PeerTransport::tuning() const {
    const std::lock_guard lock(state_->mutex);
    return state_->options.tuning;
}

}  // namespace te_graph::collectives

#endif
