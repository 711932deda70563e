#include "graph/dict_watch.h"

namespace te_graph::graph {
namespace {

// Of the process, like the dictionaries: one change makes all guards look again, which costs them microseconds once.
uint64_t changes = 0;

#if PY_VERSION_HEX >= 0x030C0000
int on_change(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
    ++changes;
    return 0;
}

int watcher() {
    static const int id = [] {
        const int added = PyDict_AddWatcher(&on_change);
        if (added < 0) PyErr_Clear();
        return added;
    }();
    return id;
}
#endif

}  // namespace

uint64_t dict_changes() { return changes; }

#if PY_VERSION_HEX >= 0x030C0000
bool watch_dict(PyObject* dict) {
    if (watcher() < 0) return false;
    if (PyDict_Watch(watcher(), dict) == 0) return true;
    PyErr_Clear();
    return false;
}
#else
bool watch_dict(PyObject*) { return false; }
#endif

}  // namespace te_graph::graph
