#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <vector>

#include "collectives/abort.h"
#include "collectives/group.h"
#include "common/run_on.h"

namespace te_graph::collectives {
namespace {

// One-shot up to here: all-gather and a local reduction.
constexpr int64_t kOneShotBytes = 64 << 10;

// Serializes the operations of all groups over one process group: ranks match operations by number, and gloo ends the
// process if two interleave.
std::shared_ptr<std::mutex> mutex_of(const c10d::ProcessGroup& process_group) {
    static std::mutex registry;
    static auto* const mutexes = new std::map<const c10d::ProcessGroup*, std::weak_ptr<std::mutex>>;
    const std::lock_guard lock(registry);
    std::erase_if(*mutexes, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<std::mutex>& known = (*mutexes)[&process_group];
    std::shared_ptr<std::mutex> mutex = known.lock();
    if (!mutex) known = mutex = std::make_shared<std::mutex>();
    return mutex;
}

// FNV-1a: the same on all ranks, whatever their standard library.
uint64_t hash_of(const std::string& name) {
    uint64_t hash = 0xCBF29CE484222325;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
    return hash;
}

class ProcessGroupTransport : public Transport {
public:
    ProcessGroupTransport(std::string group, const std::string& process_group, int rank, int world, at::Device device,
                          double timeout)
        : group_(std::move(group)),
          process_group_(c10d::resolve_process_group(process_group)),
          rank_(rank),
          world_(world),
          device_(device),
          operation_mutex_(mutex_of(*process_group_)) {
        set_timeout(timeout);
    }

    void run(const Operation& operation) override {
        const std::lock_guard lock(*operation_mutex_);
        check(operation.name);
        ++sequence_;
        try {
            if (device_.is_cpu()) compare_fingerprints(operation.fingerprint());
            if (operation.input.numel() == 0) return;
            if (operation.op == Op::kAllGather) return gather(bytes_of(operation.input), bytes_of(operation.out));
            const at::Tensor rows = received(operation);
            const at::Tensor sums = is_two_shot(operation) ? at::empty({rows.size(1)}, rows.options()) : operation.out;
            TE_GRAPH_RUN(sums.device(), reduce_rows, rows_of(operation, world_, rows, sums));
            if (is_two_shot(operation)) gather_pieces(sums, operation.out);
        } catch (const c10::Error& error) {
            abort_with(operation, error.what_without_backtrace());
        } catch (const std::exception& error) {
            abort_with(operation, error.what());
        }
    }

    void check(const char* op) override { abort_reason_.check(op); }
    void abort() override { abort_reason_.set_aborted(group_, rank_); }

    void set_timeout(double seconds) override {
        // Up: 0 ms would be no time at all.
        timeout_ = std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
    }

private:
    [[noreturn]] void abort_with(const Operation& operation, const std::string& why) {
        abort_reason_.set("group " + group_ + " was aborted on rank " + std::to_string(rank_) + " in operation " +
                          std::to_string(sequence_) + ", " + describe(operation.fingerprint()) + ": " + why);
        check(operation.name);
        std::abort();  // not reached: check() throws
    }

    // On CPUs ranks compare what they are about to do, the extents themselves beside the flag, and for which group: a
    // process group serves several. On GPUs that would need a host sync.
    void compare_fingerprints(const Fingerprint& fingerprint) {
        struct Compared {
            uint64_t flag, group;
            Extents extents;
        };
        constexpr auto kBytes = static_cast<int64_t>(sizeof(Compared));
        const at::Tensor mine = at::empty({kBytes}, at::kByte), all = at::empty({world_ * kBytes}, at::kByte);
        const auto& own = *new (mine.data_ptr())
                              Compared{flag_of(sequence_, pack(fingerprint)), hash_of(group_), fingerprint.extents};
        gather(mine, all);
        for (int p = 0; p < world_; ++p) {
            const auto& seen = static_cast<const Compared*>(all.const_data_ptr())[p];
            const bool is_of_group = seen.group == own.group;
            TORCH_CHECK(is_of_group && seen.flag == own.flag && seen.extents == own.extents,
                        "expected the same operation on all ranks, but rank ", p, " runs operation ",
                        sequence_of(seen.flag), ", ", describe({kind_of(seen.flag), seen.extents}),
                        is_of_group ? "" : " of another group of this process group");
        }
    }

    // The rows of all ranks that this one sums up -> [world, n]: of an all-reduce whole tensors, or this rank's piece
    // of each, the last one filled up with zeros.
    at::Tensor received(const Operation& operation) {
        const at::Tensor input = sent_of(operation);
        if (operation.op == Op::kReduceScatter) return exchanged(input);
        const int64_t numel = input.numel(), piece = (numel + world_ - 1) / world_;
        if (!is_two_shot(operation)) {
            const at::Tensor all = at::empty({world_, numel}, input.options());
            gather(bytes_of(input), bytes_of(all));
            return all;
        }
        at::Tensor pieces = input;
        if (numel != piece * world_) {
            pieces = at::empty({piece * world_}, input.options());
            pieces.narrow(0, 0, numel).copy_(input.view({-1}));
            pieces.narrow(0, numel, piece * world_ - numel).zero_();
        }
        return exchanged(pieces.view({world_, piece}));
    }

    // The sums of all ranks' pieces. sums: [n]; out: [...].
    void gather_pieces(const at::Tensor& sums, const at::Tensor& out) {
        const int64_t numel = out.numel();
        if (numel == sums.numel() * world_ && sums.scalar_type() == out.scalar_type()) {
            return gather(bytes_of(sums), bytes_of(out));
        }
        const at::Tensor all = at::empty({sums.numel() * world_}, sums.options());
        gather(bytes_of(sums), bytes_of(all));
        out.view({-1}).copy_(all.narrow(0, 0, numel));
    }

    static bool is_two_shot(const Operation& operation) {
        return operation.op == Op::kAllReduce && static_cast<int64_t>(operation.input.nbytes()) > kOneShotBytes;
    }

    // tensor [...] -> [bytes]. Process groups know few dtypes, all of them bytes. A contiguous tensor of one element
    // may have any stride.
    static at::Tensor bytes_of(const at::Tensor& tensor) {
        return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
    }

    // mine: [n]; all: [world * n].
    void gather(at::Tensor mine, at::Tensor all) {
        c10d::AllgatherOptions options;
        options.timeout = timeout_;
        process_group_->_allgather_base(all, mine, options)->wait();
    }

    // All-to-all: row p of the result is this rank's row of rank p. rows: [world, n].
    at::Tensor exchanged(const at::Tensor& rows) {
        const at::Tensor result = at::empty_like(rows);
        at::Tensor to = bytes_of(result), from = bytes_of(rows);
        std::vector<int64_t> even;
        c10d::AllToAllOptions options;
        options.timeout = timeout_;
        process_group_->alltoall_base(to, from, even, even, options)->wait();
        return result;
    }

    std::string group_;
    c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
    int rank_, world_;
    at::Device device_;
    std::atomic<std::chrono::milliseconds> timeout_;  // threads set it while others run operations
    uint64_t sequence_ = 0;
    const std::shared_ptr<std::mutex> operation_mutex_;
    AbortReason abort_reason_;
};

}  // namespace

std::unique_ptr<Transport> make_process_group_transport(const std::string& group, const std::string& process_group,
                                                        int rank, int world, at::Device device, double timeout) {
    return std::make_unique<ProcessGroupTransport>(group, process_group, rank, world, device, timeout);
}

}  // namespace te_graph::collectives
