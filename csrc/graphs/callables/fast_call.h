// The call of a graphed module without Python in between.
//
// torch.nn.Module.__call__, the method forward and the handle's choices are some hundred bytecodes for every layer. A
// graphed module's class gets a __call__ of its own that replays at once where nothing speaks against it, and leaves
// everything else (hooks, keyword arguments, other modes, refusals) to torch.nn.Module.__call__.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "graphs/callables/callable.h"
#include "graphs/guards/callable_guard.h"

namespace te_graph::graphs {

// What the call must know of one graphed module: attribute `fast_call` of its handle `te_graph`.
struct FastCall {
    std::shared_ptr<GraphedCallable> callable;
    std::shared_ptr<CallableGuard>
        plain;       // passes while the instance lets torch.nn.Module.__call__ do nothing but call forward
    size_t tensors;  // number of arguments, all of them tensors
    bool grad_mode;
    unsigned plain_class = 0;  // version of the class that was found to do the same; versions are of one class each
};

// `fast` as a Python object.
pybind11::object to_python(std::unique_ptr<FastCall> fast);

// Notes what torch.nn.Module's calls consist of, before a part is replaced.
void prepare_fast_calls();

// A __call__ for a subclass of torch.nn.Module, which shows the function `shown` as its own. The class's method forward
// has to be there as well under the name `_te_graph_forward`.
pybind11::object make_fast_call(const pybind11::object& shown);

}  // namespace te_graph::graphs
