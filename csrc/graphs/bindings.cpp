#include "graphs/bindings.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "common/check.h"
#include "common/host_steps.h"
#include "graphs/callables/callable.h"
#include "graphs/callables/fast_call.h"
#include "graphs/callables/observers.h"
#include "graphs/callables/uses.h"
#include "graphs/guards/function_guard.h"
#include "graphs/guards/settings.h"
#include "graphs/hooks.h"
#include "graphs/modes.h"
#include "graphs/signal_handlers.h"

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

using Tensors = std::vector<at::Tensor>;

// A tensor over the same memory that keeps alive the graph whose pool it is from, and leaves the memory to later
// captures into that pool.
at::Tensor borrow(const at::Tensor& tensor, const std::shared_ptr<Graph>& graph) {
    return at::from_blob(
        tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [graph](void*) {}, tensor.options(),
        tensor.device());
}

std::vector<std::optional<at::Tensor>> borrow_all(const std::vector<std::optional<at::Tensor>>& tensors,
                                                  const py::object& captured) {
    const auto graph = make_graph(captured);
    std::vector<std::optional<at::Tensor>> borrowed;
    for (const auto& tensor : tensors) {
        borrowed.push_back(tensor ? std::optional(borrow(*tensor, graph)) : std::nullopt);
    }
    return borrowed;
}

// New tensors over the memory of `tensors`, which has been written: they share version counters, moved on.
Tensors written_aliases(const Tensors& tensors) {
    Tensors aliases;
    for (const at::Tensor& tensor : tensors) {
        c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
        if (!tensor.is_inference()) impl->bump_version();
        aliases.emplace_back(impl->shallow_copy_and_detach(impl->version_counter(), true));
    }
    return aliases;
}

// Of a graph that holds forwards and backwards.
std::string change_of_steps(const HostSteps& steps) {
    for (const Direction direction : kDirections) {
        for (const auto& step : steps.of(direction)) {
            if (std::string change = step->change(); !change.empty()) return change;
        }
    }
    return {};
}
void run_steps(const HostSteps& steps) {
    for (const Direction direction : kDirections) steps.prepare(direction);
    for (const Direction direction : kDirections) steps.run(direction);
}

std::vector<at::ScalarType> dtypes_of(const std::vector<py::object>& dtypes) {
    std::vector<at::ScalarType> result;
    for (const auto& dtype : dtypes) result.push_back(py::cast<at::ScalarType>(dtype));
    return result;
}

std::shared_ptr<GradientTable> make_table(const std::vector<int64_t>& sizes, const std::vector<py::object>& sources,
                                          const std::vector<py::object>& destinations, at::Device device) {
    return std::make_shared<GradientTable>(sizes, dtypes_of(sources), dtypes_of(destinations), device);
}

void add_slot(GraphedCallable& callable, const py::object& forward, const py::object& backward, Tensors inputs,
              Tensors outputs, std::vector<std::shared_ptr<Staging>> grad_outputs,
              const std::vector<std::optional<at::Tensor>>& grad_inputs, std::vector<Tensors> use_grads,
              Tensors parameter_grads, std::vector<int> summed_inputs, std::shared_ptr<GradientTable> table,
              std::vector<std::pair<at::Generator, uint64_t>> rewinds, const HostSteps& host_steps) {
    const auto forward_graph = make_graph(forward);
    const auto backward_graph = backward.is_none() ? nullptr : make_graph(backward);
    if (!rewinds.empty()) rewind(forward_graph, backward_graph, std::move(rewinds));
    Tensors defined_grad_inputs;
    for (const auto& grad : grad_inputs) defined_grad_inputs.push_back(grad.value_or(at::Tensor()));
    auto slot = std::unique_ptr<Slot>(new Slot{.forward = forward_graph,
                                               .backward = backward_graph,
                                               .inputs = std::move(inputs),
                                               .outputs = StaticTensors(std::move(outputs)),
                                               .grad_outputs = std::move(grad_outputs),
                                               .grad_inputs = StaticTensors(std::move(defined_grad_inputs)),
                                               .use_grads = std::move(use_grads),
                                               .parameter_grads = std::move(parameter_grads),
                                               .summed_inputs = std::move(summed_inputs),
                                               .table = std::move(table)});
    slot->host_steps.add(host_steps);
    callable.add_slot(std::move(slot));
}

// What a Python object stands for; null while it is being made.
template <typename T>
T* instance_of(PyObject* self) {
    auto value = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
    return value.holder_constructed() ? static_cast<T*>(value.value_ptr()) : nullptr;
}

// Lets the garbage collector see what a guard keeps alive: tensors, functions and what has no weak references.
template <typename T, int (*visit_guards)(const T&, visitproc, void*), void (*clear_guards)(T&)>
void collect_garbage_through_guards(PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        const T* const owner = instance_of<T>(self);
        return owner ? visit_guards(*owner, visit, arg) : 0;
    };
    type.tp_clear = [](PyObject* self) {
        if (T* const owner = instance_of<T>(self)) clear_guards(*owner);
        return 0;
    };
}

int visit_callable(const GraphedCallable& callable, visitproc visit, void* arg) {
    return callable.visit_guards(visit, arg);
}

void clear_callable(GraphedCallable& callable) { callable.clear_guards(); }

int visit_function_guard(const FunctionGuard& guard, visitproc visit, void* arg) {
    return guard.visit_held(visit, arg);
}

void clear_function_guard(FunctionGuard& guard) { guard.drop_held(); }

}  // namespace

void bind(py::module_& m) {
    prepare_fast_calls();
    py::class_<HostSteps, std::shared_ptr<HostSteps>>(m, "HostSteps")
        .def(py::init<>())
        .def_static("is_noting", [] { return HostSteps::current() != nullptr; })
        .def_static("is_noting_backward",
                    [] {
                        const auto steps = HostSteps::current();
                        return steps != nullptr && steps->direction() == Direction::kBackward;
                    })
        .def_static("current", &HostSteps::current)
        .def("__enter__",
             [](const std::shared_ptr<HostSteps>& steps) {
                 HostSteps::enter(steps);
                 return steps;
             })
        .def("__exit__", [](const HostSteps&, const py::args&) { HostSteps::leave(); })
        .def(
            "offer_grad_buffer",
            [](HostSteps& steps, const at::Tensor& parameter, at::Tensor buffer) {
                steps.grad_buffers().offer(parameter, std::move(buffer));
            },
            py::arg("parameter"), py::arg("buffer"))
        .def_property_readonly("requested_grad_buffers",
                               [](HostSteps& steps) {
                                   std::vector<std::pair<at::Tensor, bool>> wanted;
                                   for (const auto& [parameter, to_main_grad] : steps.grad_buffers().requests()) {
                                       wanted.emplace_back(parameter, to_main_grad);
                                   }
                                   return wanted;
                               })
        .def("__len__",
             [](const HostSteps& steps) {
                 return steps.of(Direction::kForward).size() + steps.of(Direction::kBackward).size();
             })
        .def("change", &change_of_steps)
        .def("run", &run_steps)
        .def("finish", [](const HostSteps& steps) {
            for (const Direction direction : kDirections) steps.finish(direction);
        });
    m.def("saved_tensor_pack_hooks", &saved_tensor_pack_hooks);
    m.def("has_saved_tensor_hooks", &has_saved_tensor_hooks);
    m.def("enter_session", &enter_session);
    m.def("leave_session", &leave_session);
    m.def("in_session", &in_session);
    m.def("is_observed", &is_observed);
    m.def("exchange_signal_handler", &exchange_signal_handler, py::arg("number"), py::arg("handler"));
    m.def("make_fast_call", &make_fast_call, py::arg("shown"));
    m.def(
        "fast_call",
        [](std::shared_ptr<GraphedCallable> callable, std::shared_ptr<CallableGuard> plain, size_t tensors,
           bool grad_mode) {
            return to_python(
                std::make_unique<FastCall>(FastCall{std::move(callable), std::move(plain), tensors, grad_mode}));
        },
        py::arg("callable"), py::arg("plain"), py::arg("tensors"), py::arg("grad_mode"));
    m.def("is_stream_capturing", &is_stream_capturing, py::arg("device") = py::none());
    m.def("offset_in_capture", &offset_in_capture, py::arg("device"));
    m.def("abandon_pool", &abandon_pool, py::arg("device"), py::arg("pool"));
    m.def("has_memory", &has_memory, py::arg("tensor"));
    m.def("node_count", &node_count, py::arg("cuda_graph"));
    m.def("split_uses", &split_uses, py::arg("outputs"), py::arg("leaf"));
    m.def("difference_of_counts", &difference_of_counts, py::arg("expected"), py::arg("got"));
    m.def("is_dense", &is_dense, py::arg("tensor"));
    m.def("refuse_observers", &refuse_observers_of_argument, py::arg("tensor"), py::arg("name"));
    m.def(
        "lay_out",
        [](const at::Tensor& grad, const at::Tensor& parameter, const std::optional<at::Tensor>& main_grad) {
            return lay_out(grad, parameter, main_grad.value_or(at::Tensor()));
        },
        py::arg("grad"), py::arg("parameter"), py::arg("main_grad"));
    m.def(
        "move_if_lent", [](const at::Tensor& tensor) { move_if_lent(*tensor.storage().unsafeGetStorageImpl()); },
        py::arg("tensor"));
    m.def("alias_in_place", &alias_in_place, py::arg("tensor"));
    m.def("borrow", &borrow_all, py::arg("tensors"), py::arg("cuda_graph"));

    bind_nodes(m);

    py::class_<LeafIsolation>(m, "LeafIsolation")
        .def(py::init<Tensors, bool>(), py::arg("leaves"), py::arg("with_accumulators"))
        .def("restore", &LeafIsolation::restore);

    py::class_<ReplayOrder, std::shared_ptr<ReplayOrder>>(m, "ReplayOrder")
        .def(py::init<at::Device>(), py::arg("device"))
        .def(
            "replay",
            [](ReplayOrder& replay_order, CapturedGraph& graph, const Tensors& written) {
                {
                    const py::gil_scoped_release no_gil;  // a launch may wait for the GPU
                    const c10::DeviceGuard on_device(replay_order.device());
                    replay_order.enter();
                    graph.replay();
                }
                return written_aliases(written);
            },
            py::arg("graph"), py::arg("written"));

    py::class_<Settings>(m, "Settings")
        .def(py::init([](at::Device device, bool with_modes, bool with_autocast_cache, bool with_autocast_dtype) {
                 return Settings(device.type(), {with_modes, with_autocast_cache, with_autocast_dtype});
             }),
             py::arg("device"), py::arg("with_modes") = false, py::arg("with_autocast_cache") = false,
             py::arg("with_autocast_dtype") = false)
        .def("change", &Settings::change);

    py::class_<MainGradReset, std::shared_ptr<MainGradReset>>(m, "MainGradReset")
        .def(py::init<>())
        .def_property(
            "is_pending", [](const MainGradReset& reset) { return reset.is_pending.load(); },
            [](MainGradReset& reset, bool is_pending) { reset.is_pending = is_pending; });

    py::enum_<StepKind>(m, "StepKind")
        .value("INSTANCE_DICT", StepKind::kInstanceDict)
        .value("ITEM", StepKind::kItem)
        .value("ABSENT", StepKind::kAbsent)
        .value("LENGTH", StepKind::kLength)
        .value("POSITION", StepKind::kPosition)
        .value("CELL", StepKind::kCell)
        .value("ATTRIBUTE", StepKind::kAttribute)
        .value("KEYS", StepKind::kKeys)
        .value("ITEM_OF", StepKind::kItemOf)
        .value("GRAD", StepKind::kGrad)
        .value("KNOWN", StepKind::kKnown)
        .value("TYPE", StepKind::kType)
        .value("TYPE_ITEM", StepKind::kTypeItem)
        .value("TYPE_ABSENT", StepKind::kTypeAbsent)
        .value("TYPE_VERSION", StepKind::kTypeVersion)
        .value("NO_ATTRIBUTE", StepKind::kNoAttribute)
        .value("CLASS", StepKind::kClass)
        .value("MEMBER", StepKind::kMember)
        .value("CODE", StepKind::kCode)
        .value("CONTENTS", StepKind::kContents)
        .value("ELEMENT", StepKind::kElement)
        .value("REFERENT", StepKind::kReferent)
        .value("CACHED", StepKind::kCached)
        .value("CONTEXT_VAR", StepKind::kContextVar)
        .value("WEAK_REFERENCE", StepKind::kWeakReference)
        .value("CONSTANT", StepKind::kConstant)
        .value("NEVER", StepKind::kNever);

    m.def(
        "type_version", [](const py::type& type) { return type_version(reinterpret_cast<PyTypeObject*>(type.ptr())); },
        py::arg("type"));
    m.def("register_value_type", &register_value_type, py::arg("type"), py::arg("key"), py::arg("is_mutable"));
    py::class_<Value, std::shared_ptr<Value>>(m, "Value").def_property_readonly("is_mutable", &Value::is_mutable);
    m.def(
        "value_of", [](const py::object& object) { return std::shared_ptr<Value>(Value::of(object.ptr())); },
        py::arg("object"));
    m.def(
        "keys_of", [](const py::dict& dict) { return std::shared_ptr<Value>(Value::of_keys(dict.ptr())); },
        py::arg("dict"));

    py::class_<Guard, std::shared_ptr<Guard>>(m, "Guard")
        .def("add_step", &Guard::add_step, py::arg("kind"), py::arg("parent"), py::arg("key"), py::arg("index"),
             py::arg("expected"), py::arg("subject"), py::arg("is_ephemeral") = false)
        .def("add_tensor", &Guard::add_tensor, py::arg("step"), py::arg("tensor"), py::arg("is_used") = true,
             py::arg("is_written") = false, py::arg("compares_hooks") = false)
        .def("expect_identity", &Guard::expect_identity, py::arg("step"), py::arg("object"))
        .def("expect_value", &Guard::expect_value, py::arg("step"), py::arg("value"))
        .def("expect_type", &Guard::expect_type, py::arg("step"), py::arg("type"))
        .def("expect_same", &Guard::expect_same, py::arg("step"), py::arg("other"))
        .def_property_readonly("steps", &Guard::steps)
        .def_property_readonly("tensors", &Guard::tensors);
    py::class_<FunctionGuard, Guard, std::shared_ptr<FunctionGuard>>(
        m, "FunctionGuard",
        py::custom_type_setup(
            &collect_garbage_through_guards<FunctionGuard, visit_function_guard, clear_function_guard>))
        .def(py::init<>())
        .def("check", [](const FunctionGuard& guard, const py::object& root) { return guard.check(root.ptr()); })
        .def("begin",
             [](const FunctionGuard& guard, const Settings& settings, const py::object& root,
                const std::vector<int>& steps) {
                 std::vector<py::object> found;
                 std::string change = settings.change();
                 if (change.empty()) change = guard.begin(root.ptr(), steps, found);
                 return std::make_pair(std::move(change), std::move(found));
             })
        .def("find", [](const FunctionGuard& guard, const py::object& root, const std::vector<int>& steps) {
            std::vector<py::object> found;
            std::string change = guard.find(root.ptr(), steps, found);
            return std::make_pair(std::move(change), std::move(found));
        });
    py::class_<CallableGuard, Guard, std::shared_ptr<CallableGuard>>(m, "CallableGuard")
        .def(py::init<>())
        .def("keep", &CallableGuard::keep, py::arg("functions"))
        .def("check", [](const CallableGuard& guard, const py::object& root) {
            CallableGuard::Tensors found;
            return guard.check(root.ptr(), found);
        });

    py::class_<GradientTable, std::shared_ptr<GradientTable>>(m, "GradientTable")
        .def(py::init(&make_table), py::arg("sizes"), py::arg("source_dtypes"), py::arg("destination_dtypes"),
             py::arg("device"))
        .def_property_readonly("entries", &GradientTable::entries)
        .def_property_readonly("chunks", &GradientTable::chunks)
        .def_property_readonly("uploads", &GradientTable::uploads)
        .def("bind", &GradientTable::bind, py::arg("sources"))
        .def_static(
            "takes",
            [](const py::object& source, const py::object& destination) {
                return GradientTable::takes(py::cast<at::ScalarType>(source), py::cast<at::ScalarType>(destination));
            },
            py::arg("source"), py::arg("destination"));

    py::class_<InputSpec>(m, "InputSpec")
        .def(py::init(
                 [](std::string name, std::vector<bool> depends_on, bool is_linked, bool is_saved, bool is_cast_anew) {
                     return InputSpec{std::move(name), std::move(depends_on), is_linked, is_saved, is_cast_anew};
                 }),
             py::arg("name"), py::arg("depends_on"), py::arg("is_linked"), py::arg("is_saved"),
             py::arg("is_cast_anew"));

    py::class_<Staging, std::shared_ptr<Staging>>(m, "Staging")
        .def(py::init([](at::Tensor tensor, bool is_lent) {
                 return Staging{std::move(tensor), is_lent};
             }),
             py::arg("tensor"), py::arg("is_lent"))
        .def("note_write", &Staging::note_write)
        .def_readonly("tensor", &Staging::tensor)
        .def_readonly("is_lent", &Staging::is_lent);

    py::class_<ParameterSpec>(m, "ParameterSpec")
        .def(py::init([](int tensor, int main_grad, std::vector<bool> depends_on, bool through_autograd,
                         bool main_grad_fits, bool has_grad_buffer, std::shared_ptr<MainGradReset> main_grad_reset) {
                 return ParameterSpec{tensor,         main_grad,       std::move(depends_on),     through_autograd,
                                      main_grad_fits, has_grad_buffer, std::move(main_grad_reset)};
             }),
             py::arg("tensor"), py::arg("main_grad"), py::arg("depends_on"), py::arg("through_autograd"),
             py::arg("main_grad_fits"), py::arg("has_grad_buffer"), py::arg("main_grad_reset"));

    py::class_<NonlinearPart>(m, "NonlinearPart")
        .def(py::init([](std::vector<bool> outputs, std::string message) {
                 return NonlinearPart{std::move(outputs), std::move(message)};
             }),
             py::arg("outputs"), py::arg("message"));

    py::class_<View, std::shared_ptr<View>>(m, "View")
        .def(py::init<const at::Tensor&, const at::Tensor&>(), py::arg("tensor"), py::arg("base"))
        .def("of", &View::of, py::arg("base"))
        .def_static("is_differentiable", &View::is_differentiable, py::arg("tensor"), py::arg("base"))
        .def_static("is_possible", &View::is_possible, py::arg("tensor"), py::arg("base"));

    py::class_<ResultSpec> result(m, "ResultSpec");
    py::enum_<ResultSpec::Origin>(result, "Origin")
        .value("OUTPUT", ResultSpec::Origin::kOutput)
        .value("INPUT", ResultSpec::Origin::kInput)
        .value("EXTERNAL", ResultSpec::Origin::kExternal);
    result.def(py::init([](ResultSpec::Origin origin, size_t number, std::shared_ptr<View> view, bool is_early) {
                   return ResultSpec{origin, number, std::move(view), is_early};
               }),
               py::arg("origin"), py::arg("number"), py::arg("view"), py::arg("is_early"));

    py::class_<ExternalSpec>(m, "ExternalSpec")
        .def(py::init([](bool saved, bool written) {
                 return ExternalSpec{saved, written};
             }),
             py::arg("saved"), py::arg("written"));

    py::class_<ReplayMiss> miss(m, "ReplayMiss");
    py::enum_<ReplayMiss::Kind>(miss, "Kind")
        .value("CAPTURING", ReplayMiss::Kind::kCapturing)
        .value("MODE", ReplayMiss::Kind::kMode)
        .value("CHECKPOINT", ReplayMiss::Kind::kCheckpoint)
        .value("ARGUMENTS", ReplayMiss::Kind::kArguments)
        .value("CIRCUMSTANCES", ReplayMiss::Kind::kCircumstances)
        .value("DISCERNIBLE", ReplayMiss::Kind::kDiscernible)
        .value("EXHAUSTED", ReplayMiss::Kind::kExhausted)
        .value("UNLINKED", ReplayMiss::Kind::kUnlinked)
        .value("ENTANGLED", ReplayMiss::Kind::kEntangled);
    miss.def(py::init([](ReplayMiss::Kind kind, std::string message) {
                 return ReplayMiss{kind, std::move(message)};
             }),
             py::arg("kind"), py::arg("message"))
        .def_readonly("kind", &ReplayMiss::kind)
        .def_readonly("message", &ReplayMiss::message);

    py::class_<GraphedCallable, std::shared_ptr<GraphedCallable>>(
        m, "GraphedCallable",
        py::custom_type_setup(&collect_garbage_through_guards<GraphedCallable, visit_callable, clear_callable>))
        .def(py::init<std::string, at::Device, std::shared_ptr<ReplayOrder>, std::shared_ptr<CallableGuard>,
                      std::vector<InputSpec>, std::vector<ParameterSpec>, std::vector<ExternalSpec>, std::vector<int>,
                      std::vector<bool>, std::vector<bool>, std::vector<ResultSpec>, std::shared_ptr<GraphedCallable>,
                      std::shared_ptr<CallableGuard>, std::vector<NonlinearPart>, bool, bool>(),
             py::arg("name"), py::arg("device"), py::arg("replay_order"), py::arg("guard"), py::arg("inputs"),
             py::arg("parameters"), py::arg("externals"), py::arg("differentiable"), py::arg("saved_outputs"),
             py::arg("inner_outputs"), py::arg("results"), py::arg("predecessor"), py::arg("backward_guard"),
             py::arg("nonlinear_parts"), py::arg("compares_autocast_cache"), py::arg("compares_autocast_dtype"))
        .def("add_slot", &add_slot, py::arg("forward"), py::arg("backward"), py::arg("inputs"), py::arg("outputs"),
             py::arg("grad_outputs"), py::arg("grad_inputs"), py::arg("use_grads"), py::arg("parameter_grads"),
             py::arg("summed_inputs"), py::arg("table"), py::arg("rewinds"), py::arg("host_steps"))
        .def("forward", [](GraphedCallable& callable, const py::object& root,
                           const Tensors& inputs) { return callable.forward(root.ptr(), inputs); })
        .def("route_through_autograd", &GraphedCallable::route_through_autograd, py::arg("parameter"))
        .def_property_readonly("graphs", &GraphedCallable::graphs)
        .def_property_readonly("in_flight", &GraphedCallable::in_flight)
        .def_property_readonly("forward_replays", &GraphedCallable::forward_replays)
        .def_property_readonly("backward_replays", &GraphedCallable::backward_replays);
}

}  // namespace te_graph::graphs
