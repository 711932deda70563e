// Modes of the calling thread that want to see every operation: a replay has none to show them.
#pragma once

namespace te_graph::graph {

// Marks this thread as capturing: calls then run eagerly, to be captured themselves.
void enter_session();
void leave_session();
bool in_session();

// A mode that is on, in the words of a refusal ("called under a TorchDispatchMode"); nullptr when there is none.
const char* observing_mode();

// Whether a graphed function has to run as it is: in a session, while somebody captures the current stream, under one of
// these modes, and while forward-mode derivatives are taken, which any tensor that it reaches may carry.
bool is_observed();

}  // namespace te_graph::graph
