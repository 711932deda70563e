#include "collectives/group.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "collectives/abort.h"
#include "common/abort_flag.h"
#include "common/run_on.h"

namespace te_graph::collectives {
namespace {

// of: what stands before the dtype; along: what stands behind it.
std::string describe_kind(const OperationKind& kind, const std::string& of, const std::string& along) {
    static constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "an unknown operation"};
    std::ostringstream text;
    text << kNames[static_cast<int>(kind.op) & 3];
    if (kind.op != Op::kAllGather) text << (kind.reduction == Reduction::kSum ? " (sum)" : " (max)");
    text << " of " << of;
    if (kind.dtype == kFloatSentAsBFloat16) {
        text << "Float sent as BFloat16";
    } else if (kind.dtype < static_cast<uint8_t>(c10::ScalarType::NumOptions)) {
        text << c10::toString(static_cast<c10::ScalarType>(kind.dtype));
    } else {
        text << "elements of unknown dtype";
    }
    text << along << (kind.in_backward ? " in a backward" : "");
    return text.str();
}

class LocalTransport : public Transport {
public:
    explicit LocalTransport(std::string group) : group_(std::move(group)) {}

    void run(const Operation& operation) override {
        check(operation.name);
        const at::Tensor &input = operation.input, &out = operation.out;
        if (operation.is_scaled() || operation.sends_bf16) {
            const at::Tensor own = sent_of(operation);
            TE_GRAPH_RUN(out.device(), reduce_rows, rows_of(operation, 1, own, out));
        } else if (out.const_data_ptr() != input.const_data_ptr()) {
            out.view({-1}).copy_(input.view({-1}));
        }
    }
    void check(const char* op) override { abort_reason_.check(op); }
    void abort() override { abort_reason_.set_aborted(group_, 0); }
    void set_timeout(double) override {}  // nothing waits

private:
    std::string group_;
    AbortReason abort_reason_;
};

struct Registry {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<const Group>> groups;
};

// Never destroyed: at exit CUDA may be gone before the groups are.
Registry& registry() {
    static auto* const instance = new Registry;
    return *instance;
}

void check_open_groups(const char* caller) {
    std::vector<std::shared_ptr<const Group>> groups;
    {
        const std::lock_guard lock(registry().mutex);
        for (const auto& [name, group] : registry().groups) groups.push_back(group);
    }
    any_group_aborted.store(false, std::memory_order_relaxed);
    for (const auto& group : groups) {
        try {
            group->transport->check(caller);
        } catch (...) {
            any_group_aborted.store(true, std::memory_order_relaxed);
            throw;
        }
    }
}

// The library is loaded before any group can be made.
const bool registered = [] {
    check_all_groups = &check_open_groups;
    return true;
}();

}  // namespace

std::string describe(const OperationKind& kind) { return describe_kind(kind, "", ""); }

std::string describe(const Fingerprint& fingerprint) {
    const Extents& extents = fingerprint.extents;
    std::ostringstream along;
    if (fingerprint.kind.op != Op::kAllReduce) {
        along << " along dim " << extents.dim << " of size " << extents.size() << " (" << extents.before << " before, "
              << extents.behind << " behind)";
    }
    return describe_kind(fingerprint.kind, std::to_string(extents.numel) + ' ', along.str());
}

at::Tensor sent_of(const Operation& operation) {
    return operation.sends_bf16 ? operation.input.to(at::kBFloat16) : operation.input;
}

Rows rows_of(const Operation& operation, int ranks, const at::Tensor& rows, const at::Tensor& out) {
    return {.rows = rows.const_data_ptr(),
            .out = out.data_ptr(),
            .columns = out.numel(),
            .ranks = ranks,
            .element = element_of(rows.scalar_type()),
            .out_element = element_of(out.scalar_type()),
            .reduction = operation.reduction,
            .is_rounded = operation.op == Op::kAllReduce,
            .scale = static_cast<float>(operation.scale),
            .scale_tensor = operation.scale_data()};
}

std::unique_ptr<Transport> make_local_transport(std::string group) {
    return std::make_unique<LocalTransport>(std::move(group));
}

void add_group(std::shared_ptr<const Group> group) {
    const std::lock_guard lock(registry().mutex);
    const std::string name = group->name;
    TORCH_CHECK_VALUE(registry().groups.emplace(name, std::move(group)).second, "PeerGroup: expected a new name, got '",
                      name, "', which an open group has");
}

void remove_group(const std::string& name) {
    std::shared_ptr<const Group> removed;  // outlives the lock
    const std::lock_guard lock(registry().mutex);
    if (const auto found = registry().groups.find(name); found != registry().groups.end()) {
        removed = std::move(found->second);
        registry().groups.erase(found);
    }
}

std::shared_ptr<const Group> find_group(const char* op, const std::string& name) {
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().groups.find(name);
    TORCH_CHECK_VALUE(found != registry().groups.end(), op, ": expected the name of a te_graph.PeerGroup, got '", name,
                      "'");
    return found->second;
}

}  // namespace te_graph::collectives
