// Modes of the calling thread that want to see every operation: a replay has none to show them.
#pragma once

#include <c10/core/Device.h>

#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

namespace te_graph::graphs {

// Marks this thread as capturing: calls then run eagerly, to be captured themselves.
void enter_session();
void leave_session();
bool in_session();

// Whether the current stream of `device` is being captured; without one, that of the current GPU, which is not
// initialised for it.
bool is_stream_capturing(std::optional<at::Device> device = std::nullopt);

// A mode that is on, in the words of a replay miss ("called under a TorchDispatchMode"); nullptr when there is none.
const char* observing_mode();

// Hooks that see or exchange what autograd saves. A replay shows them nothing.
enum class SavedTensorHooks {
    kNone,
    kCheckpoint,     // activation checkpointing, whose forward runs
    kRecomputation,  // the same, as it computes that forward again
    kOther,
};

// Those that are on. With the GIL.
SavedTensorHooks saved_tensor_hooks();

// The functions that pack what autograd saves, outermost first. With the GIL.
std::vector<pybind11::object> saved_tensor_pack_hooks();
bool has_saved_tensor_hooks();

// Whether anomaly detection looks for NaN in gradients.
bool looks_for_nan();

// Whether a graphed function has to run as it is: in a session, while the current stream is captured, under one of
// these modes or such hooks, and while forward-mode derivatives are taken, which any tensor that it reaches may carry.
// With the GIL.
bool is_observed();

}  // namespace te_graph::graphs
