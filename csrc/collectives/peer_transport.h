// Collectives by kernels that write into the memory of the other GPUs of the host.
#pragma once

#ifdef TE_GRAPH_CUDA

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/abort.h"
#include "collectives/group.h"
#include "collectives/protocols.h"
#include "common/stream_order.h"

namespace te_graph::collectives {

struct PeerMemory {
    at::Tensor buffer;                // [bytes] uint8, of this rank; kept alive
    std::vector<uint64_t> addresses;  // of all ranks' buffers, in this GPU's address space
    int64_t receive_buffer_bytes;     // at the start of each buffer; the rest is the memory pool
    int rank;
};

struct PeerOptions {
    double timeout;   // seconds
    bool traps;       // abort by ending the CUDA context
    double watchdog;  // seconds after which an unobserved failure ends the process; 0: never
    Tuning tuning;
};

class PeerTransport : public Transport {
public:
    PeerTransport(std::string group, PeerMemory memory, PeerOptions options);
    ~PeerTransport() override;
    PeerTransport(const PeerTransport&) = delete;
    PeerTransport& operator=(const PeerTransport&) = delete;

    void run(const Operation& operation) override;
    void check(const char* op) override;
    void abort() override;
    void set_timeout(double seconds) override;

    // [] fp32 on the device: 0, or 1 once the group was aborted.
    const at::Tensor& found_inf() const { return found_inf_; }
    void set_tuning(const Tuning& tuning);
    Tuning tuning() const;

private:
    // The launch for `size` bytes of an operation from `begin` on.
    LaunchArgs args_of(const Operation& operation, const Selection& selection, int64_t begin, int64_t size);
    // To the device without waiting for its kernels. The caller may be in a capture.
    void write(void* address, const void* value, size_t bytes);
    // The extents that a peer has sent of the operation that `flag` is of. A peer sends them when it aborts, which may
    // be a moment later.
    std::optional<Extents> extents_sent_by(int peer, uint64_t flag) const;
    // Why the group was aborted, once it was. The same for all callers.
    const std::string& message();
    // Offset in the memory pool, where peers can write directly; -1 elsewhere.
    int64_t pool_offset_of(const char* data) const;

    const std::string group_;
    const PeerMemory memory_;
    PeerOptions options_;
    std::atomic<double> timeout_;  // current value; read by any thread for messages
    at::Tensor control_, record_memory_;
    at::Tensor found_inf_;  // [], a part of control
    FailureRecord* record_;
    Peers peers_{};
    SlotBytes slots_{};
    bool starts_early_;
    cudaStream_t side_ = nullptr;
    uint64_t launches_ = 0;
    StreamOrder order_;
    mutable std::mutex mutex_;
    std::once_flag has_message_;
    std::string text_;  // of the message
    std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace te_graph::collectives

#endif
