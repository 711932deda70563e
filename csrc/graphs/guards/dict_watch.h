// Tells when dictionaries and the code of functions change, so that what was found there need not be looked up again.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace te_graph::graphs {

// Moves on whenever what is watched has been modified, or a dictionary freed. With the GIL only.
uint64_t dict_changes();

// Watches `dict` from now on. False where Python offers no watchers (before 3.12) or has none left.
bool watch_dict(PyObject* dict);

// The same for the attributes of an object: only of names that were given to name_attribute() a change counts, so that
// a counter that is not read costs nothing.
bool watch_attributes(PyObject* dict);
void name_attribute(PyObject* name);

// Watches the code and the defaults of all functions from now on.
bool watch_functions();

}  // namespace te_graph::graphs
