// Groups of ranks, their operations, and the transports that run them. Ops find a group by its name when they run, so a
// trace or a graph holds a name and no object.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string>

#include "collectives/in_backward.h"
#include "collectives/protocols.h"

namespace te_graph::collectives {

// Element type of a dtype.
inline Element element_of(at::ScalarType dtype) {
    return dtype == at::kFloat      ? Element::kFloat32
           : dtype == at::kHalf     ? Element::kFloat16
           : dtype == at::kBFloat16 ? Element::kBFloat16
                                    : Element::kBytes;
}

// In place of a dtype, where ranks compare them.
constexpr uint8_t kFloatSentAsBFloat16 = 63;
static_assert(static_cast<int>(c10::ScalarType::NumOptions) < kFloatSentAsBFloat16);

// All tensors are contiguous, of one dtype and on the group's device.
struct Operation {
    const char* name;  // of the op, for messages
    Op op;
    Reduction reduction;
    at::Tensor input;  // all_reduce: [n]; reduce_scatter: [world, n]; all_gather: [n]
    at::Tensor out;    // all_reduce: [n], maybe `input`; reduce_scatter: [n], maybe its row of `input`;
                       // all_gather: [world, n]
    Extents extents;
    // Of sums: by what they are multiplied before they are rounded; the product of both.
    double scale = 1.0;
    at::Tensor scale_tensor = {};  // [] or [1] fp32, or undefined
    // fp32 whose sums are taken of what bf16 makes of it; those of an all-reduce are rounded to bf16 again.
    bool sends_bf16 = false;
    bool in_backward = is_in_backward();

    bool is_scaled() const { return scale != 1.0 || scale_tensor.defined(); }
    const float* scale_data() const {
        return scale_tensor.defined() ? static_cast<const float*>(scale_tensor.const_data_ptr()) : nullptr;
    }

    Fingerprint fingerprint() const {
        const uint8_t dtype = sends_bf16 ? kFloatSentAsBFloat16 : static_cast<uint8_t>(input.scalar_type());
        return {{op, reduction, dtype, in_backward}, extents};
    }
};

// "all_reduce (sum) of 1024 BFloat16 in a backward",
// "all_gather of 24 Float along dim 1 of size 4 (2 before, 3 behind)"
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

// For transports that bring the operands of all ranks here.

// The input of a reduction [...] -> [...], as it is sent.
at::Tensor sent_of(const Operation& operation);
// The sum, or largest, of what all ranks sent, for transports that bring it here.
Rows rows_of(const Operation& operation, int ranks,
             const at::Tensor& rows,  // [ranks, n] contiguous
             const at::Tensor& out);  // [n] contiguous; maybe `rows`, where there is one

// The transport of a group of one rank: no data is moved, and it can be aborted like any other.
std::unique_ptr<Transport> make_local_transport(std::string group);

// Collectives over a process group of torch.distributed: gloo on CPUs, NCCL where GPUs are not on one host or by
// choice. The process group moves bytes; reductions are te_graph's own, so results have the bits of the kernels.
// process_group: its name, as torch.distributed knows it.
std::unique_ptr<Transport> make_process_group_transport(const std::string& group, const std::string& process_group,
                                                        int rank, int world, at::Device device, double timeout);

struct Group {
    const std::string name;
    const int rank;
    const int world;
    const at::Device device;
    const std::shared_ptr<Transport> transport;
};

// Throws if there is a group of that name.
void add_group(std::shared_ptr<const Group> group);
void remove_group(const std::string& name);
// Throws if there is none.
std::shared_ptr<const Group> find_group(const char* op, const std::string& name);

}  // namespace te_graph::collectives
