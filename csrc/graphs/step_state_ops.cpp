// Registration of the ops on the state of a step.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "common/check.h"
#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "common/run_on.h"
#include "graphs/modes.h"
#include "graphs/step_state.h"

namespace te_graph::graphs {
namespace {

constexpr const char* kSet = "step_state_set_";
constexpr const char* kAdvance = "step_state_advance_";

StepState* state_of(const char* op, const at::Tensor& state) {
    check_dtype(op, "state", state, at::kInt);
    TORCH_CHECK_VALUE(state.dim() == 1 && state.size(0) == sizeof(StepState) / sizeof(int32_t) && state.is_contiguous(),
                      op, ": expected state contiguous of shape [16], got ", state.sizes(), " with strides ",
                      state.strides());
    return static_cast<StepState*>(state.data_ptr());
}

void set(const at::Tensor& state,  // [16] int32
         bool is_first_microbatch, bool update_weight_scale_inv) {
    StepState* const block = state_of(kSet, state);
    TORCH_CHECK(!is_stream_capturing(state.device()), kSet,
                ": expected no capture under way, got one: a graph would set the same flags at every replay");
    run_on(
        state.device(), [&] { set_flags_cpu(block, is_first_microbatch, update_weight_scale_inv); },
        TE_GRAPH_LAUNCH(launch_set_flags(block, is_first_microbatch, update_weight_scale_inv, stream)));
    note_write(state);
}

void advance_state(const at::Tensor& state)  // [16] int32
{
    StepState* const block = state_of(kAdvance, state);
    run_on(
        state.device(), [&] { advance(block); }, TE_GRAPH_LAUNCH(launch_advance(block, stream)));
    note_write(state);
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kSet, set);
    m.impl(kAdvance, advance_state);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kSet, [](const at::Tensor&, bool, bool) {});
    m.impl(kAdvance, [](const at::Tensor&) {});
}

TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kSet, kAdvance}) m.impl(name, no_derivative());
}

}  // namespace te_graph::graphs
