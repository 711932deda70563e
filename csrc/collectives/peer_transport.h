// Collectives by kernels that write into the memory of the other GPUs of the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "collectives/tuning.h"

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
