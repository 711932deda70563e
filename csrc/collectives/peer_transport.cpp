#include "collectives/transport.h"

#ifdef TE_GRAPH_CUDA

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>

#include "collectives/abort.h"
#include "collectives/stream_order.h"

namespace te_graph::collectives {
namespace {

// Describes the operation of a peer, as far as it is known.
std::string describe_other(const FailureRecord& record, const std::optional<Extents>& extents) {
    const OperationKind own = kind_of(record.expected), other = kind_of(record.seen);
    if (extents) return describe(Fingerprint{other, *extents});
    if (other != own) return describe(other);
    return describe(other) + (own.op == Op::kAllReduce ? " of another size" : " of another size or dim");
}

// other: the extents of a peer's operation, where that is another one and they are known.
std::string message_of(const std::string& group, int rank, double timeout, const FailureRecord& record,
                       const std::optional<Extents>& other) {
    std::ostringstream text;
    text << "group " << group << " was aborted on rank " << rank;
    if (record.expected != 0) {
        text << " in operation " << sequence_of(record.expected) << ", "
             << describe(Fingerprint{kind_of(record.expected), record.extents});
    }
    text << ": ";
    switch (record.failure) {
        case Failure::kTimeout:
            text << "no data from rank " << record.peer << " within " << timeout << " s";
            break;
        case Failure::kMismatch:
            text << "rank " << record.peer << " runs " << describe_other(record, other) << " instead";
            break;
        case Failure::kConcurrentKernels:
            text << "two operations of the group ran on one GPU at the same time; order their streams, or replay "
                    "graphs that hold them on one stream";
            break;
        case Failure::kAbortedByPeer:
            text << "rank " << record.peer << " aborted first, see its error";
            break;
        default:
            text << "abort() was called";
    }
    return text.str();
}

}  // namespace

struct PeerTransport::State {
    State(std::string name, PeerMemory buffer, PeerOptions wishes)
        : group(std::move(name)), memory(std::move(buffer)), options(wishes), timeout(wishes.timeout) {
        const c10::cuda::CUDAGuard guard(memory.buffer.device());
        {
            const c10::InferenceMode read_only;  // outside of it: users see a part
            control = at::empty({static_cast<int64_t>(sizeof(Control) / sizeof(float))},
                                memory.buffer.options().dtype(at::kFloat));
            found_inf = control.select(0, offsetof(Control, failed) / sizeof(float));
        }
        record_memory =
            at::empty({static_cast<int64_t>(sizeof(FailureRecord))}, at::TensorOptions(at::kByte).pinned_memory(true));
        record = new (record_memory.data_ptr()) FailureRecord{};

        peers.rank = memory.rank;
        peers.world = static_cast<int32_t>(memory.addresses.size());
        slots = divide_receive_buffer(memory.receive_buffer_bytes, 2 * static_cast<int64_t>(peers.world - 1));
        peers.ll128_slot_bytes = slots.ll128;
        peers.data_slot_bytes = slots.data;
        peers.flag_slot_bytes = slots.flags;
        peers.control = static_cast<Control*>(control.data_ptr());
        starts_early = can_start_early();
        for (int p = 0; p < peers.world; ++p) {
            char* const address = reinterpret_cast<char*>(memory.addresses[p]);
            peers.receive_buffer[p] = peers.pool[p] = address;
        }

        // Contents of an earlier allocation must not look like lines of this group.
        memory.buffer.narrow(0, 0, memory.receive_buffer_bytes).zero_();
        const int64_t data = peers.data_slots(peers.rank) - peers.receive_buffer[peers.rank];
        memory.buffer.narrow(0, data, 2 * (peers.world - 1) * slots.data).fill_(kSentinelByte);
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
        watchdog.reset();  // its thread may use the stream
        C10_CUDA_CHECK_WARN(cudaStreamDestroy(side));
    }

    static uint64_t nanoseconds(double seconds) { return static_cast<uint64_t>(std::ceil(seconds * 1e9)); }

    // To the device without waiting for its kernels. The caller may be in a capture.
    void write(void* address, const void* value, size_t bytes) {
        const c10::cuda::CUDAGuard guard(memory.buffer.device());
        const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
        C10_CUDA_CHECK(cudaMemcpyAsync(address, value, bytes, cudaMemcpyHostToDevice, side));
        C10_CUDA_CHECK(cudaStreamSynchronize(side));
    }

    // The extents that a peer has sent of the operation that `flag` is of. A peer sends them when it aborts, which may
    // be a moment later.
    std::optional<Extents> extents_sent_by(int peer, uint64_t flag) const {
        using Clock = std::chrono::steady_clock;
        const auto* const address = &peers.signal_pad(peers.rank)->extents[peer];
        const Clock::time_point end = Clock::now() + std::chrono::milliseconds(100);
        // The caller may be in a capture. A context that has ended answers nothing; the message is built without them.
        try {
            const c10::cuda::CUDAGuard guard(memory.buffer.device());
            const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
            do {
                Extents sent{};
                C10_CUDA_CHECK(cudaMemcpyAsync(&sent, address, sizeof(sent), cudaMemcpyDeviceToHost, side));
                C10_CUDA_CHECK(cudaStreamSynchronize(side));
                if (fits(sent, flag)) return sent;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            } while (Clock::now() < end);
        } catch (const c10::Error&) {
        }
        return {};
    }

    // Why the group was aborted, once it was. The same for all callers.
    const std::string& message() {
        std::call_once(has_message, [&] {
            std::optional<Extents> other;
            if (record->failure == Failure::kMismatch) other = extents_sent_by(record->peer, record->seen);
            text = message_of(group, peers.rank, timeout, *record, other);
        });
        return text;
    }

    // Offset in the memory pool, where peers can write directly; -1 elsewhere.
    int64_t pool_offset_of(const char* data) const {
        const auto* const buffer = static_cast<const char*>(memory.buffer.const_data_ptr());
        return data >= buffer && data < buffer + memory.buffer.nbytes() ? data - buffer : -1;
    }

    void launch(const Operation& operation, cudaStream_t stream) {
        const int64_t world = peers.world;
        const auto bytes = static_cast<int64_t>(std::max(operation.input.nbytes(), operation.out.nbytes()));
        const Selection selection = select_for(operation.op, bytes, peers.world, slots, options.tuning);
        const auto* const input = static_cast<const char*>(operation.input.const_data_ptr());
        auto* const out = static_cast<char*>(operation.out.data_ptr());
        // Pieces of which a launch does `count` units each: of a two-shot all-reduce, one for each rank.
        const int64_t unit = unit_bytes(selection.protocol);
        const int64_t pieces = selection.algorithm == Algorithm::kTwoShot ? world : 1;
        const int64_t most = selection.count * unit * pieces;
        const int64_t whole = operation.op == Op::kAllReduce ? bytes : bytes / world;
        peers.extents = operation.extents;
        for (int64_t begin = 0; begin < whole; begin += most) {
            const int64_t size = std::min(most, whole - begin);
            LaunchArgs args{};
            args.count = (units_in(selection.protocol, size) + pieces - 1) / pieces;
            args.algorithm = selection.algorithm;
            args.element = element_of(operation.input.scalar_type());
            args.reduction = operation.reduction;
            args.starts_early = starts_early;
            args.fingerprint = pack(operation.fingerprint());
            args.launch = kLaunchIds[launches++ % kLaunchIds.size()];
            args.pool_offset = pool_offset_of(out + begin);
            switch (operation.op) {
                case Op::kReduceScatter:
                    args.input = {input + begin, bytes - begin, whole, size};
                    args.out = {out + begin, size, 0, size};
                    break;
                case Op::kAllGather:
                    args.input = {input + begin, size, 0, size};
                    args.out = {out + begin, bytes - begin, whole, size};
                    break;
                case Op::kAllReduce:
                    const int64_t piece = pieces == 1 ? size : args.count * unit;
                    const int64_t stride = pieces == 1 ? 0 : piece;
                    args.input = {input + begin, size, stride, piece};
                    args.out = {out + begin, size, stride, piece};
            }
            const bool is_simple = selection.protocol == Protocol::kSimple;
            args.blocks = (is_simple ? blocks_for_chunks : blocks_for_lines)(args.count, options.tuning.blocks);
            const auto launch_by = is_simple                                  ? launch_simple
                                   : selection.protocol == Protocol::kLamport ? launch_lamport
                                                                              : launch_ll128;
            C10_CUDA_CHECK(launch_by(peers, args, stream));
        }
    }

    const std::string group;
    const PeerMemory memory;
    PeerOptions options;
    std::atomic<double> timeout;  // current value; read by any thread for messages
    at::Tensor control, record_memory;
    at::Tensor found_inf;  // [], a part of control
    FailureRecord* record;
    Peers peers{};
    SlotBytes slots{};
    bool starts_early;
    cudaStream_t side = nullptr;
    uint64_t launches = 0;
    StreamOrder order;
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
    const c10::cuda::CUDAGuard guard(state_->memory.buffer.device());
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    state_->order.run(stream, [&] { state_->launch(operation, stream); });
}

void PeerTransport::check(const char* op) {
    if (static_cast<volatile FailureRecord*>(state_->record)->is_set == 0) return;
    any_group_aborted.store(true, std::memory_order_relaxed);
    state_->watchdog->acknowledge();
    TORCH_CHECK(false, op, ": ", state_->message());
}

void PeerTransport::abort() {
    const std::lock_guard lock(state_->mutex);
    auto& record = *static_cast<volatile FailureRecord*>(state_->record);
    if (record.is_set != 0) return;
    const float failed = 1;
    const int32_t claimed = 1;
    state_->write(&state_->peers.control->is_claimed, &claimed, sizeof(claimed));
    state_->write(&state_->peers.control->failed, &failed, sizeof(failed));
    record.failure = Failure::kAborted;
    record.is_set = 1;
    const uint64_t aborted = 1 + static_cast<uint64_t>(state_->peers.rank);
    for (int p = 0; p < state_->peers.world; ++p) {
        state_->write(&state_->peers.signal_pad(p)->abort, &aborted, sizeof(aborted));
    }
}

void PeerTransport::set_timeout(double seconds) {
    const std::lock_guard lock(state_->mutex);
    state_->timeout = seconds;
    const uint64_t timeout_ns = State::nanoseconds(seconds);
    state_->write(&state_->peers.control->timeout_ns, &timeout_ns, sizeof(timeout_ns));
}

// -> [].
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
