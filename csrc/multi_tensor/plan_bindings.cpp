// Plans for Python: each op over a plan's table, after a look at its tensors.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "multi_tensor/bindings.h"
#include "multi_tensor/dispatched_op.h"
#include "multi_tensor/operands.h"
#include "multi_tensor/plan.h"
#include "multi_tensor/scale.h"
#include "multi_tensor/tensor_sequence.h"

namespace py = pybind11;

namespace te_graph::multi_tensor {
namespace {

// -> [].
at::Tensor plan_norm(const Plan& plan, double p) {
    static const DispatchedOp<at::Tensor, const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                              at::ScalarType>
        op("te_graph::multi_tensor_norm_table");
    return op(plan.table(), plan.chunks(), plan.partial(), p, plan.norm_dtype());
}

void plan_clip(const Plan& plan,
               const at::Tensor& total_norm,  // [] or [1]
               double max_norm, double eps,
               const MaybeTensor& found_inf)  // [] or [1]
{
    static const DispatchedOp<void, const at::Tensor&, const at::Tensor&, const at::Tensor&, double, double,
                              const MaybeTensor&>
        op("te_graph::multi_tensor_clip_table_");
    op(plan.table(), plan.chunks(), total_norm, max_norm, eps, found_inf);
}

void plan_accumulate(const Plan& plan, bool store, bool zero_source,
                     const MaybeTensor& scale,        // [] or [1]
                     const MaybeTensor& sum_squares,  // [kPartialWords]
                     const MaybeTensor& found_inf,    // [] or [1]
                     const MaybeTensor& noop)         // [] or [1]
{
    TORCH_CHECK_VALUE(plan.has_sources(),
                      "MultiTensorPlan: expected a plan with sources, got none: MultiTensorPlan(tensors, sources)");
    TORCH_CHECK_TYPE((store && !sum_squares) || plan.may_accumulate(),
                     "MultiTensorPlan: expected sources of their destinations' dtypes, or torch.float16 or "
                     "torch.bfloat16 for torch.float32, got others");
    static const DispatchedOp<void, const at::Tensor&, const at::Tensor&, std::optional<bool>, bool, const MaybeTensor&,
                              const MaybeTensor&, const MaybeTensor&, const MaybeTensor&>
        op("te_graph::multi_tensor_accumulate_table_");
    plan.check_write(zero_source, {kPlan,
                                   {{"scale", scale, false},
                                    {"sum_squares", sum_squares, true},
                                    {"found_inf", found_inf, true},
                                    {"noop", noop, false}}});
    op(plan.table(), plan.chunks(), store, zero_source, scale, sum_squares, found_inf, noop);
    plan.note_write(zero_source);
}

void plan_scale(const Plan& plan,
                const at::Tensor& scale,       // [] or [1]
                const MaybeTensor& found_inf)  // [] or [1]
{
    static const DispatchedOp<void, const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&> op(
        "te_graph::multi_tensor_scale_table_");
    plan.check_write(false, {kPlan, {{"scale", scale, false}, {"found_inf", found_inf, true}}});
    op(plan.table(), plan.chunks(), scale, found_inf);
    plan.note_write(false);
}

void plan_zero(const Plan& plan) {
    static const DispatchedOp<void, const at::Tensor&, const at::Tensor&> op("te_graph::multi_tensor_zero_table_");
    plan.check_write(false, {kPlan, {}});
    op(plan.table(), plan.chunks());
    plan.note_write(false);
}

}  // namespace

void bind_plan(py::module_& m) {
    py::class_<Plan>(m, "Plan")
        .def(py::init([](const py::sequence& tensors, const py::sequence& sources) {
                 return std::make_unique<Plan>(TensorSequence(tensors, kPlan, "tensors").tensors(),
                                               TensorSequence(sources, kPlan, "sources").tensors());
             }),
             py::arg("tensors"), py::arg("sources"))
        .def_property_readonly("table", &Plan::table)
        .def_property_readonly("chunks", &Plan::chunks)
        .def_property_readonly("partial", &Plan::partial)
        .def("__len__", &Plan::size)
        .def("check", py::overload_cast<bool, bool>(&Plan::check, py::const_), py::arg("writes_tensors"),
             py::arg("writes_sources"))
        .def("tensors", &Plan::tensors, py::arg("with_tensors"), py::arg("with_sources"))
        .def(
            "update",
            [](Plan& plan, const py::sequence& tensors, const py::sequence& sources) {
                plan.update(TensorSequence(tensors, kPlan, "tensors").tensors(),
                            TensorSequence(sources, kPlan, "sources").tensors());
            },
            py::arg("tensors"), py::arg("sources"))
        .def(
            "norm",
            [](const Plan& plan, double p) {
                plan.check(false, false);
                return plan_norm(plan, p);
            },
            py::arg("p"))
        .def(
            "clip_",
            [](const Plan& plan, const at::Tensor& total_norm, double max_norm, double eps,
               const MaybeTensor& found_inf) {
                plan.check_write(false, {kPlan, {{"total_norm", total_norm, false}, {"found_inf", found_inf, true}}});
                plan_clip(plan, total_norm, max_norm, eps, found_inf);
                plan.note_write(false);
            },
            py::arg("total_norm"), py::arg("max_norm"), py::arg("eps") = kClipEps, py::arg("found_inf") = py::none())
        .def(
            "clip_norm_",
            [](const Plan& plan, double max_norm, double p, const MaybeTensor& found_inf) {
                plan.check_write(false, {kPlan, {{"found_inf", found_inf, true}}});
                at::Tensor total_norm = plan_norm(plan, p);
                plan_clip(plan, total_norm, max_norm, kClipEps, found_inf);
                plan.note_write(false);
                return total_norm;
            },
            py::arg("max_norm"), py::arg("p"), py::arg("found_inf"))
        .def("scale_", &plan_scale, py::arg("scale"), py::arg("found_inf"))
        .def("zero_", &plan_zero)
        .def("accumulate_", &plan_accumulate, py::arg("store"), py::arg("zero_source"), py::arg("scale"),
             py::arg("sum_squares"), py::arg("found_inf"), py::arg("noop"));
}

}  // namespace te_graph::multi_tensor
