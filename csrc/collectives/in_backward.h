// Whether an operation is called inside a backward: part of what ranks compare. Compiled code and replays run the
// backward of a collective whose result the loss does not use, which eager autograd leaves out.
#pragma once

#include <optional>

namespace te_graph::collectives {

// True while autograd runs a backward on this thread, or as a replay says.
bool is_in_backward();

// A replay on the CPU calls the operations that were captured: what was true then, on this thread, until it is {}.
void set_in_backward(std::optional<bool> captured);

}  // namespace te_graph::collectives
