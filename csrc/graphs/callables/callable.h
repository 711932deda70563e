// One graphed callable: its slots, what it takes for granted, and the forward and backward replay.
//
// forward:  inputs, settings and guard -> a free slot -> protect lent outputs -> copy inputs -> replay -> lend outputs,
//           tie them to a ReplayNode -> results, which are outputs, or views of outputs, inputs or tensors outside.
// backward: (ReplayNode) addresses and versions -> gradients of outputs -> protect lent input gradients -> table
//           entries -> replay -> set .grad.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "common/main_grad_reset.h"
#include "graphs/callables/gradient_table.h"
#include "graphs/callables/lent_storages.h"
#include "graphs/callables/pending_backward.h"
#include "graphs/callables/replay_miss.h"
#include "graphs/callables/replay_order.h"
#include "graphs/callables/slot.h"
#include "graphs/callables/slot_leases.h"
#include "graphs/callables/view.h"
#include "graphs/capture/graph.h"
#include "graphs/guards/callable_guard.h"
#include "graphs/guards/settings.h"

namespace te_graph::graphs {

// A leaf outside the callable that its backward computes a gradient for.
struct ParameterSpec {
    int tensor;                    // its number in the guard
    int main_grad;                 // number of its main_grad in the guard, or -1
    std::vector<bool> depends_on;  // [differentiable outputs]
    bool through_autograd;         // always by an autograd edge
    bool main_grad_fits;           // the table writes it; else an ordinary op after the replay
    bool has_grad_buffer;          // the op that computes the gradient adds it up in the slots' parameter_grads
    std::shared_ptr<MainGradReset> main_grad_reset;  // with main_grad only
};

struct InputSpec {
    std::string name;
    std::vector<bool> depends_on;  // [differentiable outputs]; empty when it gets no gradient
    bool is_linked;                // its static memory is a result of the predecessor in a chain
    bool is_saved;                 // autograd saved it for backward
    bool is_cast_anew;             // autocast casts it at each of several uses, and would cast a leaf once
};

// A part of the backward that only gradients of certain outputs reach. It is not linear in them, draws random numbers
// or writes memory outside: where none of them comes, a replay must not run it with zeros.
struct NonlinearPart {
    std::vector<bool> outputs;  // [differentiable outputs]
    std::string message;
};

// A gradient whose hooks are to be called, once the backward of the callable is over: they may run another one.
struct HookedGradient {
    at::Tensor parameter, gradient;
};

// What a backward leaves to its node.
struct BackwardResults {
    torch::autograd::variable_list gradients;  // one for each edge
    std::vector<HookedGradient> hooked;
};

// Where a result comes from.
struct ResultSpec {
    enum class Origin { kOutput, kInput, kExternal };
    Origin origin;
    size_t number;                     // of the output, the input, or the guard's tensor
    std::shared_ptr<const View> view;  // of that; null: the very tensor
    bool is_early;                     // the view is made before the node: autograd goes through nodes in their order
};

// What the guard's tensors mean to autograd.
struct ExternalSpec {
    bool saved;    // autograd saved it for backward: it must not be modified in between
    bool written;  // the forward writes it: its version is bumped as eager execution would
};

class GraphedCallable : public std::enable_shared_from_this<GraphedCallable> {
public:
    GraphedCallable(std::string name, at::Device device, std::shared_ptr<ReplayOrder> replay_order,
                    std::shared_ptr<CallableGuard> guard, std::vector<InputSpec> inputs,
                    std::vector<ParameterSpec> parameters, const std::vector<ExternalSpec>& externals,
                    std::vector<int> differentiable, std::vector<bool> saved_outputs, std::vector<bool> inner_outputs,
                    std::vector<ResultSpec> results, const std::shared_ptr<GraphedCallable>& predecessor,
                    std::shared_ptr<CallableGuard> backward_guard, std::vector<NonlinearPart> nonlinear_parts,
                    bool compares_autocast_cache, bool compares_autocast_dtype);

    void add_slot(std::unique_ptr<Slot> slot);

    // Replays the forward. root: the Python callable that the guard starts from. inputs: tensors of the arguments, in
    // order. Returns one tensor per result; or why not, and then nothing has been launched or changed.
    std::variant<std::vector<at::Tensor>, ReplayMiss> forward(PyObject* root, const std::vector<at::Tensor>& inputs);

    // Replays the backwards of `chain`, last forward first, each of which reads its gradient where the one before
    // writes it. The gradients are, for each of them, those of its input edges, then of its parameters'.
    static BackwardResults backward(std::vector<PendingBackward>& chain, torch::autograd::variable_list grads);

    // True when the gradient that `upper`, a pending backward of this callable, writes is all that `lower` reads.
    bool continues(const PendingBackward& upper, const PendingBackward& lower) const;
    bool is_linked(const InputEdge& edge) const { return inputs_[edge.input].is_linked; }

    // Lets the gradient of parameter number `parameter` go through autograd from the next forward on.
    void route_through_autograd(size_t parameter) { parameters_.at(parameter).through_autograd = true; }

    bool has_parameter(const PendingBackward& pending, const at::Tensor& leaf) const;

    // A forward's parameters will never get their gradients: the next forward says so.
    void note_lost_gradients() { has_lost_gradients_ = true; }

    const std::string& name() const { return name_; }
    // For the garbage collector: what the guards keep alive. Clearing them is the end of the callable.
    int visit_guards(visitproc visit, void* arg) const;
    void clear_guards() const;

    // Of all slots: each forward, followed by its backward.
    std::vector<std::shared_ptr<CapturedGraph>> graphs() const;

    int in_flight() const { return leases_->in_flight(); }
    int64_t forward_replays() const { return forward_replays_; }
    int64_t backward_replays() const { return backward_replays_; }

private:
    using Bits = std::vector<bool>;

    std::optional<ReplayMiss> check(PyObject* root, const std::vector<at::Tensor>& inputs,
                                    CallableGuard::Tensors& externals, int& slot) const;
    std::string difference_of_inputs(const std::vector<at::Tensor>& inputs) const;
    std::string difference_of_memory(const std::vector<at::Tensor>& inputs, const FoundTensors& externals) const;
    void make_results(bool early, const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      const CallableGuard::Tensors& externals, std::vector<at::Tensor>& results) const;
    std::optional<ReplayMiss> check_saved_tensor_hooks() const;
    std::optional<ReplayMiss> choose_slot(const std::vector<at::Tensor>& inputs, int& slot) const;
    std::optional<ReplayMiss> choose_linked_slot(const std::vector<at::Tensor>& inputs, int& slot) const;
    ReplayMiss held_elsewhere() const;
    bool finds_linked_inputs(const Slot& slot, const std::vector<at::Tensor>& inputs) const;
    void attach_node(SlotLease lease, CallableGuard::Tensors externals, const std::vector<at::Tensor>& inputs,
                     std::vector<at::Tensor>& outputs);

    Slot& slot_of(const PendingBackward& pending) const { return *slots_[pending.lease.slot()]; }
    void check_backward(const PendingBackward& pending) const;
    void check_what_backward_reads() const;
    void check_nonlinear_parts(const Bits& got) const;
    void load_grad_outputs(Slot& slot, torch::autograd::variable_list& grads) const;
    Bits grads_from(const PendingBackward& upper, const Bits& got_upper, const Slot& slot) const;
    void plan_parameters(PendingBackward& pending, const Bits& got, std::vector<MainGradReset*>& used_up);
    void enter_grad_views(const PendingBackward& pending) const;
    void note_accumulated(const PendingBackward& pending) const;
    bool is_awaited(const PendingBackward& pending) const;
    void note_use_outside(size_t parameter);
    void warn_of_lost_gradients();
    void warn_of_autocast();
    void note_main_grad_unused(size_t number) const;  // of the parameter
    void note_layout(std::vector<bool>& noted, size_t number, const std::string& what, const at::Tensor& given,
                     const at::Tensor& captured, const char* advice) const;
    bool repeats_last(const PendingBackward& pending) const;
    void note_for_repetition(const PendingBackward& pending);
    GradientTable::EntryWrite write_of_parameter(const PendingBackward& pending, size_t parameter) const;
    GradientTable::EntryWrite write_of(const PendingBackward& pending, size_t entry) const;
    const at::Tensor& destination(const PendingBackward& pending, size_t parameter) const;
    const at::Tensor& main_grad_of(const PendingBackward& pending, size_t parameter) const;
    bool is_grad_buffer(size_t parameter, const at::Tensor& tensor) const;
    void protect_grad_buffer(const PendingBackward& pending, size_t parameter);
    at::Tensor lend_grad_buffer(size_t parameter);
    void prepare_grad_buffers(const PendingBackward& pending);
    void restore_main_grads(const PendingBackward& pending);
    void separate_overlapping(const PendingBackward& pending) const;
    bool leaves_nothing_behind(const PendingBackward& pending) const;
    void check_for_nan(const PendingBackward& pending) const;
    void note_stored(const PendingBackward& pending, std::vector<MainGradReset*>& used_up) const;
    void finish(const PendingBackward& pending, const Bits& got, std::vector<MainGradReset*>& used_up,
                BackwardResults& results);
    static bool repeats_a_step(const std::vector<PendingBackward>& chain);
    static std::shared_ptr<Graph> merged(const std::vector<PendingBackward>& chain, const std::vector<Bits>& got);
    ReplayMiss changed(const std::string& change) const;

    const std::string name_;
    const at::Device device_;
    const std::shared_ptr<ReplayOrder> replay_order_;
    const std::shared_ptr<CallableGuard> guard_;
    const std::shared_ptr<CallableGuard> backward_guard_;  // over what Python code in the backward reads; null: nothing
    const std::vector<NonlinearPart> nonlinear_parts_;
    const Settings settings_;
    const std::vector<InputSpec> inputs_;
    std::vector<ParameterSpec> parameters_;
    std::vector<size_t> saved_;    // externals that autograd saved for backward: not to be modified in between
    std::vector<size_t> written_;  // externals that the forward writes: their version is bumped as in eager execution
    const std::vector<int> differentiable_;          // numbers of the outputs that require a gradient
    const std::vector<bool> saved_outputs_;          // [outputs]: backward reads the output itself
    const std::vector<bool> inner_outputs_;          // [differentiable outputs]: another one is computed from it
    const std::vector<ResultSpec> results_;          // empty: the outputs, in order
    const std::shared_ptr<SlotLeases> predecessor_;  // the slots that linked inputs lie in, or null
    const std::shared_ptr<SlotLeases> leases_;
    const int position_;                               // in the chain
    std::vector<std::shared_ptr<LentStorages>> lent_;  // [slots]
    std::vector<at::Tensor> buffers_;                  // [parameters] whose memory .grad gets when it was None
    std::vector<size_t> buffered_;                     // parameters whose gradients the ops that compute them add up
    std::vector<std::unique_ptr<LentStorages>> lent_buffers_;  // [parameters], of these: what is or has been .grad
    std::vector<std::unique_ptr<Slot>> slots_;
    mutable std::vector<bool> reordered_inputs_, reordered_grads_, unused_main_grads_;  // warned about once
    std::atomic<bool> has_lost_gradients_{false};
    bool has_warned_of_lost_gradients_ = false;
    bool has_warned_of_autocast_ = false;
    std::atomic<int64_t> forward_replays_{0};
    std::atomic<int64_t> backward_replays_{0};
};

}  // namespace te_graph::graphs
