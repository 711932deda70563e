#include "collectives/process_group.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <chrono>
#include <mutex>
#include <vector>

#include "collectives/element_of.h"
#include "collectives/notice.h"
#include "collectives/reduce_rows.h"
#include "common/run_on.h"

namespace te_graph::collectives {
namespace {

// Up to here everybody gets everything and sums all: one step instead of two.
constexpr int64_t kOneStepBytes = 64 << 10;

class ProcessGroupTransport : public Transport {
public:
    ProcessGroupTransport(std::string group, const std::string& process_group, int rank, int world, at::Device device,
                          double timeout)
        : group_(std::move(group)),
          process_group_(c10d::resolve_process_group(process_group)),
          rank_(rank),
          world_(world),
          device_(device) {
        set_timeout(timeout);
    }

    void run(const Operation& operation) override {
        // Threads take turns: ranks compare operations by number, and gloo ends the process if two mix.
        const std::lock_guard turn(turn_);
        check(operation.name);
        ++sequence_;
        try {
            if (device_.is_cpu()) compare_signatures(operation.signature());
            dispatch(operation);
        } catch (const c10::Error& error) {
            give_up(operation, error.what_without_backtrace());
        } catch (const std::exception& error) {
            give_up(operation, error.what());
        }
    }

    void check(const char* op) override {
        const std::lock_guard lock(mutex_);
        TORCH_CHECK(trouble_.empty(), op, ": ", trouble_);
    }

    void abort() override {
        note_trouble("group " + group_ + " was given up on rank " + std::to_string(rank_) + ": abort() was called");
    }

    void set_timeout(double seconds) override {
        timeout_ = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
    }

private:
    [[noreturn]] void give_up(const Operation& operation, const std::string& why) {
        note_trouble("group " + group_ + " was given up on rank " + std::to_string(rank_) + " in operation " +
                     std::to_string(sequence_) + ", " + describe(operation.signature()) + ": " + why);
        check(operation.name);
        std::abort();  // not reached: check() throws
    }

    // The first one stays.
    void note_trouble(const std::string& trouble) {
        const std::lock_guard lock(mutex_);
        if (trouble_.empty()) trouble_ = trouble;
        is_some_group_given_up.store(true, std::memory_order_relaxed);
    }

    // On CPUs ranks compare what they are about to do, the extents themselves beside the flag; on GPUs that would need
    // a host sync.
    void compare_signatures(const Signature& signature) {
        struct Compared {
            uint64_t flag;
            Extents extents;
        };
        constexpr auto kBytes = static_cast<int64_t>(sizeof(Compared));
        const at::Tensor mine = at::empty({kBytes}, at::kByte), all = at::empty({world_ * kBytes}, at::kByte);
        const auto& own = *new (mine.data_ptr()) Compared{flag_of(sequence_, pack(signature)), signature.extents};
        gather(mine, all);
        for (int p = 0; p < world_; ++p) {
            const auto& seen = static_cast<const Compared*>(all.const_data_ptr())[p];
            TORCH_CHECK(seen.flag == own.flag && seen.extents == own.extents,
                        "expected the same of all ranks, and rank ", p, " is at operation ", sequence_of(seen.flag),
                        ", ", describe({kind_of(seen.flag), seen.extents}));
        }
    }

    void dispatch(const Operation& operation) {
        const at::Tensor &input = operation.input, &out = operation.out;
        switch (operation.op) {
            case Op::kAllGather:
                return gather(bytes_of(input), bytes_of(out));
            case Op::kReduceScatter:
                return reduce(operation, exchanged(input), out);
            case Op::kAllReduce:
                break;
        }
        const int64_t numel = input.numel(), piece = (numel + world_ - 1) / world_;
        if (static_cast<int64_t>(input.nbytes()) <= kOneStepBytes) {
            const at::Tensor all = at::empty({world_, numel}, input.options());
            gather(bytes_of(input), bytes_of(all));
            return reduce(operation, all, out);
        }
        at::Tensor pieces = input;
        if (numel != piece * world_) {
            pieces = at::empty({piece * world_}, input.options());
            pieces.narrow(0, 0, numel).copy_(input.view({-1}));
            pieces.narrow(0, numel, piece * world_ - numel).zero_();
        }
        const at::Tensor sums = at::empty({piece}, input.options());
        reduce(operation, exchanged(pieces.view({world_, piece})), sums);
        if (numel == piece * world_) return gather(bytes_of(sums), bytes_of(out));
        const at::Tensor all = at::empty({piece * world_}, input.options());
        gather(bytes_of(sums), bytes_of(all));
        out.view({-1}).copy_(all.narrow(0, 0, numel));
    }

    // Process groups know few dtypes, all of them bytes. A contiguous tensor of one element may have any stride.
    static at::Tensor bytes_of(const at::Tensor& tensor) {
        return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
    }

    // mine: [n]; all: [world * n].
    void gather(at::Tensor mine, at::Tensor all) {
        c10d::AllgatherOptions options;
        options.timeout = timeout_;
        process_group_->_allgather_base(all, mine, options)->wait();
    }

    // Row p of what rank p has for this rank. rows: [world, n].
    at::Tensor exchanged(const at::Tensor& rows) {
        const at::Tensor result = at::empty_like(rows);
        at::Tensor to = bytes_of(result), from = bytes_of(rows);
        std::vector<int64_t> even;
        c10d::AllToAllOptions options;
        options.timeout = timeout_;
        process_group_->alltoall_base(to, from, even, even, options)->wait();
        return result;
    }

    // rows: [world, n]; out: [n].
    void reduce(const Operation& operation, const at::Tensor& rows, const at::Tensor& out) {
        const Rows work{rows.const_data_ptr(),         out.data_ptr(),     out.numel(), world_,
                        element_of(out.scalar_type()), operation.reduction};
        run_on(
            out.device(), [&] { reduce_rows_cpu(work); }, TE_GRAPH_LAUNCH(launch_reduce_rows(work, stream)));
    }

    std::string group_;
    c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
    int rank_, world_;
    at::Device device_;
    std::chrono::milliseconds timeout_{};
    uint64_t sequence_ = 0;
    std::mutex turn_;   // of the operation that runs
    std::mutex mutex_;  // of trouble_
    std::string trouble_;
};

}  // namespace

std::unique_ptr<Transport> make_process_group_transport(const std::string& group, const std::string& process_group,
                                                        int rank, int world, at::Device device, double timeout) {
    return std::make_unique<ProcessGroupTransport>(group, process_group, rank, world, device, timeout);
}

}  // namespace te_graph::collectives
