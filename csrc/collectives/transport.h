// An operation of a group, and the transports that run it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <vector>

#include "collectives/tuning.h"

namespace te_graph::collectives {

// Element type of a dtype.
inline Element element_of(at::ScalarType dtype) {
    return dtype == at::kFloat      ? Element::kFloat32
           : dtype == at::kHalf     ? Element::kFloat16
           : dtype == at::kBFloat16 ? Element::kBFloat16
                                    : Element::kBytes;
}

// All tensors are contiguous, of one dtype and on the group's device.
struct Operation {
    const char* name;  // of the op, for messages
    Op op;
    Reduction reduction;
    at::Tensor input;  // all_reduce: [n]; reduce_scatter: [world, n]; all_gather: [n]
    at::Tensor out;    // all_reduce: [n], maybe `input`; reduce_scatter: [n]; all_gather: [world, n]
    Extents extents;

    Fingerprint fingerprint() const { return {{op, reduction, static_cast<uint8_t>(input.scalar_type())}, extents}; }
};

// "all_reduce (sum) of 1024 BFloat16", "all_gather of 24 Float along dim 1 of size 4 (2 before, 3 behind)"
std::string describe(const Fingerprint& fingerprint);
// "all_reduce (sum) of BFloat16"
std::string describe(const OperationKind& kind);

// Moves data between ranks.
class Transport {
public:
    virtual ~Transport() = default;
    // On the current stream. Errors that are known before anything runs are thrown. Tensors may have no elements.
    virtual void run(const Operation& operation) = 0;
    // Throws if the group was aborted. `op`: the caller, for the message.
    virtual void check(const char* op) = 0;
    // Aborts the group: operations end on this rank and, where they can be notified, on all ranks.
    virtual void abort() = 0;
    virtual void set_timeout(double seconds) = 0;
};

// The transport of a group of one rank: no data is moved, and it can be aborted like any other.
std::unique_ptr<Transport> make_local_transport(std::string group);

// Collectives over a process group of torch.distributed: gloo on CPUs, NCCL where GPUs are not on one host or by
// choice. The process group moves bytes; reductions are te_graph's own, so results have the bits of the kernels.
// process_group: its name, as torch.distributed knows it.
std::unique_ptr<Transport> make_process_group_transport(const std::string& group, const std::string& process_group,
                                                        int rank, int world, at::Device device, double timeout);

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

// Collectives by kernels that write into the memory of the other GPUs of the host.
class PeerTransport : public Transport {
public:
    PeerTransport(std::string group, PeerMemory memory, PeerOptions options);
    ~PeerTransport() override;

    void run(const Operation& operation) override;
    void check(const char* op) override;
    void abort() override;
    void set_timeout(double seconds) override;

    // [] fp32 on the device: 0, or 1 once the group was aborted.
    at::Tensor found_inf() const;
    void set_tuning(const Tuning& tuning);
    Tuning tuning() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace te_graph::collectives
