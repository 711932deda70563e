#include "graphs/guards/dict_watch.h"

namespace te_graph::graphs {
namespace {

// Of the process, like the dictionaries: one change makes all guards look again, which costs them microseconds once.
uint64_t changes = 0;

#if PY_VERSION_HEX >= 0x030C0000
// Strings, compared by value. Kept for good: names of attributes are few.
PyObject* names() {
    static PyObject* const set = PySet_New(nullptr);
    return set;
}

int on_change(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
    ++changes;
    return 0;
}

int on_attribute_change(PyDict_WatchEvent event, PyObject*, PyObject* key, PyObject*) {
    const bool is_of_one =
        event == PyDict_EVENT_ADDED || event == PyDict_EVENT_MODIFIED || event == PyDict_EVENT_DELETED;
    if (is_of_one && key && PyUnicode_CheckExact(key)) {
        if (PySet_Contains(names(), key) != 0) ++changes;
    } else {
        ++changes;
    }
    return 0;
}

int added(PyDict_WatchCallback callback) {
    const int id = PyDict_AddWatcher(callback);
    if (id < 0) PyErr_Clear();
    return id;
}

int on_function_change(PyFunction_WatchEvent event, PyFunctionObject*, PyObject*) {
    if (event != PyFunction_EVENT_CREATE && event != PyFunction_EVENT_DESTROY) ++changes;
    return 0;
}

bool watch(int watcher, PyObject* dict) {
    if (watcher < 0) return false;
    if (PyDict_Watch(watcher, dict) == 0) return true;
    PyErr_Clear();
    return false;
}
#endif

}  // namespace

uint64_t dict_changes() { return changes; }

#if PY_VERSION_HEX >= 0x030C0000
bool watch_dict(PyObject* dict) {
    static const int watcher = added(&on_change);
    return watch(watcher, dict);
}
bool watch_attributes(PyObject* dict) {
    static const int watcher = added(&on_attribute_change);
    return watch(watcher, dict);
}
void name_attribute(PyObject* name) {
    if (PySet_Add(names(), name) < 0) PyErr_Clear();
}
bool watch_functions() {
    static const int watcher = PyFunction_AddWatcher(&on_function_change);
    if (watcher < 0) PyErr_Clear();
    return watcher >= 0;
}
#else
bool watch_dict(PyObject*) { return false; }
bool watch_attributes(PyObject*) { return false; }
void name_attribute(PyObject*) {}
bool watch_functions() { return false; }
#endif

}  // namespace te_graph::graphs
