#include "collectives/peer_transport.h"

#ifdef TE_GRAPH_CUDA

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <sstream>
#include <thread>

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

uint64_t nanoseconds(double seconds) { return static_cast<uint64_t>(std::ceil(seconds * 1e9)); }

// Of the larger of input and output.
int64_t bytes_of(const Operation& operation) {
    return static_cast<int64_t>(std::max(operation.input.nbytes(), operation.out.nbytes()));
}
// Pieces of which a launch does `count` units each: of a two-shot all-reduce, one for each rank.
int64_t pieces_of(Algorithm algorithm, int64_t world) { return algorithm == Algorithm::kTwoShot ? world : 1; }

}  // namespace

PeerTransport::PeerTransport(std::string group, PeerMemory memory, PeerOptions options)
    : group_(std::move(group)), memory_(std::move(memory)), options_(options), timeout_(options.timeout) {
    const c10::cuda::CUDAGuard guard(memory_.buffer.device());
    {
        const c10::InferenceMode read_only;  // outside of it: users see a part
        control_ = at::empty({static_cast<int64_t>(sizeof(Control) / sizeof(float))},
                             memory_.buffer.options().dtype(at::kFloat));
        found_inf_ = control_.select(0, offsetof(Control, failed) / sizeof(float));
    }
    record_memory_ =
        at::empty({static_cast<int64_t>(sizeof(FailureRecord))}, at::TensorOptions(at::kByte).pinned_memory(true));
    record_ = new (record_memory_.data_ptr()) FailureRecord{};

    peers_.rank = memory_.rank;
    peers_.world = static_cast<int32_t>(memory_.addresses.size());
    slots_ = divide_receive_buffer(memory_.receive_buffer_bytes, 2 * static_cast<int64_t>(peers_.world - 1));
    peers_.ll128_slot_bytes = slots_.ll128;
    peers_.data_slot_bytes = slots_.data;
    peers_.flag_slot_bytes = slots_.flags;
    peers_.control = static_cast<Control*>(control_.data_ptr());
    starts_early_ = can_start_early();
    for (int p = 0; p < peers_.world; ++p) {
        char* const address = reinterpret_cast<char*>(memory_.addresses[p]);
        peers_.receive_buffer[p] = peers_.pool[p] = address;
    }

    // Contents of an earlier allocation must not look like lines of this group.
    memory_.buffer.narrow(0, 0, memory_.receive_buffer_bytes).zero_();
    const int64_t data = peers_.data_slots(peers_.rank) - peers_.receive_buffer[peers_.rank];
    memory_.buffer.narrow(0, data, 2 * (peers_.world - 1) * slots_.data).fill_(kSentinelByte);
    Control start{};
    start.state = 1ull << kSequenceShift;
    start.traps = options_.traps;
    start.timeout_ns = nanoseconds(options_.timeout);
    start.record = record_;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(cudaMemcpyAsync(peers_.control, &start, sizeof(start), cudaMemcpyHostToDevice, stream));
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    watchdog_ = std::make_unique<Watchdog>(record_, options_.watchdog, [this] { return message(); });
}

PeerTransport::~PeerTransport() {
    watchdog_.reset();  // its thread may use the stream
    C10_CUDA_CHECK_WARN(cudaStreamDestroy(side_));
}

void PeerTransport::write(void* address, const void* value, size_t bytes) {
    const c10::cuda::CUDAGuard guard(memory_.buffer.device());
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    C10_CUDA_CHECK(cudaMemcpyAsync(address, value, bytes, cudaMemcpyHostToDevice, side_));
    C10_CUDA_CHECK(cudaStreamSynchronize(side_));
}

std::optional<Extents> PeerTransport::extents_sent_by(int peer, uint64_t flag) const {
    using Clock = std::chrono::steady_clock;
    const auto* const address = &peers_.signal_pad(peers_.rank)->extents[peer];
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(100);
    // The caller may be in a capture. A context that has ended answers nothing; the message is built without them.
    try {
        const c10::cuda::CUDAGuard guard(memory_.buffer.device());
        const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
        do {
            Extents sent{};
            C10_CUDA_CHECK(cudaMemcpyAsync(&sent, address, sizeof(sent), cudaMemcpyDeviceToHost, side_));
            C10_CUDA_CHECK(cudaStreamSynchronize(side_));
            if (fits(sent, flag)) return sent;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } while (Clock::now() < end);
    } catch (const c10::Error&) {
    }
    return {};
}

const std::string& PeerTransport::message() {
    std::call_once(has_message_, [&] {
        std::optional<Extents> other;
        if (record_->failure == Failure::kMismatch) other = extents_sent_by(record_->peer, record_->seen);
        text_ = message_of(group_, peers_.rank, timeout_, *record_, other);
    });
    return text_;
}

int64_t PeerTransport::pool_offset_of(const char* data) const {
    const auto* const buffer = static_cast<const char*>(memory_.buffer.const_data_ptr());
    return data >= buffer && data < buffer + memory_.buffer.nbytes() ? data - buffer : -1;
}

LaunchArgs PeerTransport::args_of(const Operation& operation, const Selection& selection, int64_t begin, int64_t size) {
    const auto* const input = static_cast<const char*>(operation.input.const_data_ptr());
    auto* const out = static_cast<char*>(operation.out.data_ptr());
    const int64_t bytes = bytes_of(operation), part = bytes / peers_.world;
    const int64_t pieces = pieces_of(selection.algorithm, peers_.world);
    LaunchArgs args{};
    args.count = (units_in(selection.protocol, size) + pieces - 1) / pieces;
    args.algorithm = selection.algorithm;
    args.element = element_of(operation.input.scalar_type());
    args.reduction = operation.reduction;
    args.scale = static_cast<float>(operation.scale);
    args.scale_tensor = operation.scale_data();
    args.starts_early = starts_early_;
    args.fingerprint = pack(operation.fingerprint());
    args.launch = kLaunchIds[launches_++ % kLaunchIds.size()];
    args.pool_offset = pool_offset_of(out + begin);
    switch (operation.op) {
        case Op::kReduceScatter:
            args.input = {input + begin, bytes - begin, part, size};
            args.out = {out + begin, size, 0, size};
            break;
        case Op::kAllGather:
            args.input = {input + begin, size, 0, size};
            args.out = {out + begin, bytes - begin, part, size};
            break;
        case Op::kAllReduce:
            const int64_t piece = pieces == 1 ? size : args.count * unit_bytes(selection.protocol);
            const int64_t stride = pieces == 1 ? 0 : piece;
            args.input = {input + begin, size, stride, piece};
            args.out = {out + begin, size, stride, piece};
    }
    const auto blocks_for = selection.protocol == Protocol::kSimple ? blocks_for_chunks : blocks_for_lines;
    args.blocks = blocks_for(args.count, options_.tuning.blocks);
    return args;
}

void PeerTransport::run(const Operation& operation) {
    check(operation.name);
    if (operation.input.numel() == 0) return;
    const std::lock_guard lock(mutex_);
    const c10::cuda::CUDAGuard guard(memory_.buffer.device());
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
    const int64_t bytes = bytes_of(operation), world = peers_.world;
    const Selection selection = operation.sends_bf16
                                    ? select_bf16_for(operation.op, slots_)
                                    : select_for(operation.op, bytes, peers_.world, slots_, options_.tuning);
    TORCH_CHECK_VALUE(!operation.sends_bf16 || selection.count > 0, operation.name,
                      ": expected a group of more buffer_bytes for wire_dtype torch.bfloat16, got a receive buffer of ",
                      memory_.receive_buffer_bytes, " bytes");
    const int64_t most = selection.count * unit_bytes(selection.protocol) * pieces_of(selection.algorithm, world);
    const int64_t whole = operation.op == Op::kAllReduce ? bytes : bytes / world;
    peers_.extents = operation.extents;
    order_.run(stream, [&] {
        for (int64_t begin = 0; begin < whole; begin += most) {
            const LaunchArgs args = args_of(operation, selection, begin, std::min(most, whole - begin));
            C10_CUDA_CHECK(selection.protocol == Protocol::kSimple        ? launch_simple(peers_, args, stream)
                           : selection.protocol == Protocol::kLamport     ? launch_lamport(peers_, args, stream)
                           : selection.protocol == Protocol::kLamportBf16 ? launch_lamport_bf16(peers_, args, stream)
                                                                          : launch_ll128(peers_, args, stream));
        }
    });
}

void PeerTransport::check(const char* op) {
    if (static_cast<volatile FailureRecord*>(record_)->is_set == 0) return;
    any_group_aborted.store(true, std::memory_order_relaxed);
    watchdog_->acknowledge();
    TORCH_CHECK(false, op, ": ", message());
}

void PeerTransport::abort() {
    const std::lock_guard lock(mutex_);
    auto& record = *static_cast<volatile FailureRecord*>(record_);
    if (record.is_set != 0) return;
    const float failed = 1;
    const int32_t claimed = 1;
    write(&peers_.control->is_claimed, &claimed, sizeof(claimed));
    write(&peers_.control->failed, &failed, sizeof(failed));
    record.failure = Failure::kAborted;
    record.is_set = 1;
    const uint64_t aborted = 1 + static_cast<uint64_t>(peers_.rank);
    for (int p = 0; p < peers_.world; ++p) {
        write(&peers_.signal_pad(p)->abort, &aborted, sizeof(aborted));
    }
}

void PeerTransport::set_timeout(double seconds) {
    const std::lock_guard lock(mutex_);
    timeout_ = seconds;
    const uint64_t timeout_ns = nanoseconds(seconds);
    write(&peers_.control->timeout_ns, &timeout_ns, sizeof(timeout_ns));
}

void PeerTransport::set_tuning(const Tuning& tuning) {
    const std::lock_guard lock(mutex_);
    options_.tuning = tuning;
}
Tuning PeerTransport::tuning() const {
    const std::lock_guard lock(mutex_);
    return options_.tuning;
}

}  // namespace te_graph::collectives

#endif
