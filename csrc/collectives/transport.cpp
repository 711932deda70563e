#include "collectives/transport.h"

#include <sstream>
#include <utility>

#include "collectives/abort.h"

namespace te_graph::collectives {
namespace {

// of: what stands before the dtype.
std::string describe(const OperationKind& kind, const std::string& of) {
    static constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "an unknown operation"};
    std::ostringstream text;
    text << kNames[static_cast<int>(kind.op) & 3];
    if (kind.op != Op::kAllGather) text << (kind.reduction == Reduction::kSum ? " (sum)" : " (max)");
    text << " of " << of;
    if (kind.dtype < static_cast<uint8_t>(c10::ScalarType::NumOptions)) {
        text << c10::toString(static_cast<c10::ScalarType>(kind.dtype));
    } else {
        text << "elements of unknown dtype";
    }
    return text.str();
}

class LocalTransport : public Transport {
public:
    explicit LocalTransport(std::string group) : group_(std::move(group)) {}

    void run(const Operation& operation) override {
        check(operation.name);
        if (!operation.out.is_same(operation.input)) operation.out.view({-1}).copy_(operation.input.view({-1}));
    }
    void check(const char* op) override { abort_reason_.check(op); }
    void abort() override { abort_reason_.set_aborted(group_, 0); }
    void set_timeout(double) override {}  // nothing waits

private:
    std::string group_;
    AbortReason abort_reason_;
};

}  // namespace

std::string describe(const OperationKind& kind) { return describe(kind, ""); }

std::string describe(const Fingerprint& fingerprint) {
    const Extents& extents = fingerprint.extents;
    std::ostringstream text;
    text << describe(fingerprint.kind, std::to_string(extents.numel) + ' ');
    if (fingerprint.kind.op != Op::kAllReduce) {
        text << " along dim " << extents.dim << " of size " << extents.size() << " (" << extents.before << " before, "
             << extents.behind << " behind)";
    }
    return text.str();
}

std::unique_ptr<Transport> make_local_transport(std::string group) {
    return std::make_unique<LocalTransport>(std::move(group));
}

}  // namespace te_graph::collectives
