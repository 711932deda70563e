#include "flat/bindings.h"

#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "common/python_function.h"
#include "flat/flat_gradients.h"
#include "flat/taken_gradients.h"

namespace py = pybind11;

namespace te_graph::flat {
namespace {

// A tensor like `like` [...], which is dense, over buffer [n] from element `offset` on. It has a storage of its own,
// of its own bytes, so that it is saved and sharing is told as if it lay alone.
at::Tensor view_in_buffer(const at::Tensor& buffer, int64_t offset, const at::Tensor& like) {
    TORCH_CHECK_VALUE(0 <= offset && offset + like.numel() <= buffer.numel(),
                      "view_in_buffer: expected offset from 0 to ", buffer.numel() - like.numel(), ", got ", offset);
    char* const begin = static_cast<char*>(buffer.mutable_data_ptr()) + offset * buffer.element_size();
    return at::from_blob(
        begin, like.sizes(), like.strides(), [buffer](void*) {}, buffer.options(), buffer.device());
}

}  // namespace

void bind(py::module_& m) {
    m.def("view_in_buffer", &view_in_buffer, py::arg("buffer"), py::arg("offset"), py::arg("like"));
    m.def(
        "take_gradients",
        [](const at::Tensor& leaf, py::function take) { take_gradients(leaf, with_gil<at::Tensor>(std::move(take))); },
        py::arg("leaf"), py::arg("take"));
    py::class_<Backwards, std::shared_ptr<Backwards>>(m, "Backwards")
        .def(py::init([](py::function begin, py::function ready, py::function end, py::function fail,
                         const std::vector<size_t>& sizes) {
                 const auto asks = [held = held_on_any_thread(std::move(begin))] {
                     const py::gil_scoped_acquire gil;
                     return (*held)().cast<bool>();
                 };
                 return std::make_shared<Backwards>(
                     BackwardCalls{asks, with_gil<size_t>(std::move(ready)), with_gil<size_t>(std::move(end)),
                                   with_gil<size_t>(std::move(fail))},
                     sizes);
             }),
             py::arg("begin"), py::arg("ready"), py::arg("end"), py::arg("fail"), py::arg("bucket_sizes"))
        .def("finish_failed", &Backwards::finish_failed, py::call_guard<py::gil_scoped_release>());
    py::class_<FlatGradient, std::shared_ptr<FlatGradient>> gradient(m, "FlatGradient");
    py::class_<FlatGradient::Alike>(gradient, "Alike");
    gradient
        .def(py::init<size_t, std::string, at::Tensor, at::Tensor, at::Tensor, std::shared_ptr<MainGradReset>,
                      std::shared_ptr<Backwards>>(),
             py::arg("number"), py::arg("name"), py::arg("parameter"), py::arg("data"), py::arg("memory"),
             py::arg("reset"), py::arg("backwards"))
        .def("attach", &FlatGradient::attach)
        .def("detach", &FlatGradient::detach)
        .def("is_missing",
             [](const FlatGradient& gradient) { return gradient.state() == FlatGradient::State::kMissing; })
        .def("elsewhere", &FlatGradient::elsewhere)
        .def("protect", &FlatGradient::protect)
        .def("adopt", &FlatGradient::adopt)
        .def("note_zero", &FlatGradient::note_zero)
        .def("alike", &FlatGradient::alike)
        .def("put_back", &FlatGradient::put_back, py::arg("before"));
    using Event = FlatGradients::Event;
    const auto noting = [](Event event) { return [event](FlatGradients& gradients) { gradients.note(event); }; };
    py::class_<FlatGradients, std::shared_ptr<FlatGradients>>(m, "FlatGradients")
        .def(py::init<FlatGradients::Pointers>(), py::arg("gradients"))
        .def("first_change", &FlatGradients::first_change)
        .def("missing", &FlatGradients::missing)
        .def("elsewhere", &FlatGradients::elsewhere)
        .def("note_read", noting(Event::kRead))
        .def("unreduced", &FlatGradients::unreduced)
        .def("take_reduced", &FlatGradients::take_reduced)
        .def("taken", &FlatGradients::taken)
        .def("note_reduced", noting(Event::kReduced))
        .def("note_written", noting(Event::kWritten))
        .def("note_stepped", noting(Event::kStepped))
        .def("note_parameters_written", noting(Event::kParametersWritten))
        .def("drop", noting(Event::kDropped));
}

}  // namespace te_graph::flat
