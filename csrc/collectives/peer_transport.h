// Collectives by kernels that write into the memory of all GPUs of one host.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "collectives/tuning.h"

namespace te_graph::collectives {

struct PeerMemory {
    at::Tensor slab;               // [bytes] uint8, of this rank; kept alive
    std::vector<uint64_t> places;  // of all ranks' slabs, as this GPU addresses them
    int64_t inbox_bytes;           // at the start of each; what follows is the pool's
    int rank;
};

struct PeerOptions {
    double timeout;   // seconds
    bool traps;       // give up by ending the CUDA context
    double watchdog;  // seconds after which a failure that nobody has seen ends the process; 0: never
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

    // [] fp32 on the device: 0, or 1 once the group was given up.
    at::Tensor found_inf() const;
    void set_tuning(const Tuning& tuning);
    Tuning tuning() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace te_graph::collectives
