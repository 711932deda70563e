#include "graphs/signal_handlers.h"

#include <csignal>

namespace py = pybind11;

namespace te_graph::graphs {

void exchange_signal_handler(int number, const py::object& handler) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    py::module_::import("_signal").attr("signal")(number, handler);  // in C: no other handler runs in between
    sigaction(number, &action, nullptr);
}

}  // namespace te_graph::graphs
