// Python's handlers of signals, exchanged for the time of a capture.
#pragma once

#include <pybind11/pybind11.h>

namespace te_graph::graphs {

// As `signal.signal`, but what the process does with the signal stays as it is, flags included: code in C may have set
// a handler of its own in front of Python's, as faulthandler.register() does.
void exchange_signal_handler(int number, const pybind11::object& handler);

}  // namespace te_graph::graphs
