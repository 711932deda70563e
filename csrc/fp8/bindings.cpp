#include "fp8/bindings.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "common/python_function.h"
#include "fp8/data_writes.h"
#include "fp8/fused_products.h"
#include "fp8/gemm.h"
#include "fp8/linear_products.h"
#include "fp8/region.h"
#include "fp8/weight_table.h"

namespace py = pybind11;

namespace te_graph::fp8 {
namespace {

using TablePointer = std::shared_ptr<ScaleTable>;

py::dict as_dict(const GemmPlanInfo& info) {
    const auto dtype = info.shape.dtype == DType::kFloat32   ? "float32"
                       : info.shape.dtype == DType::kFloat16 ? "float16"
                                                             : "bfloat16";
    using py::operator""_a;
    return py::dict("device"_a = info.device, "rows"_a = info.shape.rows, "columns"_a = info.shape.columns,
                    "inner"_a = info.shape.inner, "a_dtype"_a = name_of(info.shape.a_format),
                    "b_dtype"_a = name_of(info.shape.b_format), "dtype"_a = dtype, "bias"_a = info.shape.has_bias,
                    "fast_accum"_a = info.shape.fast_accum, "accumulate"_a = info.shape.accumulate,
                    "algorithm"_a = info.algorithm, "tile"_a = info.tile, "stages"_a = info.stages,
                    "split_k"_a = info.split_k, "workspace"_a = info.workspace);
}

// LinearProducts, x [..., I], weight [O, I] or [I, O], bias [O] or None -> [..., O] or None: LinearProducts::fast_call,
// without the time that pybind11 takes for the arguments.
PyObject* fast_fp8_product(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 4 && THPVariable_Check(arguments[1]) && THPVariable_Check(arguments[2]),
                     "te_graph.Linear: expected a tensor as input and as weight, got ",
                     count == 4 ? Py_TYPE(arguments[THPVariable_Check(arguments[1]) ? 2 : 1])->tp_name : "no");
    auto& products = py::handle(arguments[0]).cast<LinearProducts&>();
    const at::Tensor& x = THPVariable_Unpack(arguments[1]);
    const at::Tensor& weight = THPVariable_Unpack(arguments[2]);
    std::optional<at::Tensor> bias;
    if (arguments[3] != Py_None) bias = py::handle(arguments[3]).cast<at::Tensor>();
    std::optional<at::Tensor> y;
    {
        const py::gil_scoped_release unlocked;
        y = products.fast_call(x, weight, bias);
    }
    if (y) return THPVariable_Wrap(*std::move(y));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

}  // namespace

void bind(py::module_& m) {
    watch_data();
    static PyMethodDef fast = {"fast_fp8_product",
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&fast_fp8_product)),
                               METH_FASTCALL, nullptr};
    m.add_object(fast.ml_name, py::reinterpret_steal<py::object>(PyCFunction_New(&fast, nullptr)));
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<ScaleTable, TablePointer>(m, "ScaleTable")
        .def(py::init<at::Tensor, at::Tensor, at::Tensor, double, double, std::string>(), py::arg("history"),
             py::arg("scale"), py::arg("scale_inv"), py::arg("fp8_max"), py::arg("margin"),
             py::arg("amax_compute_algo"))
        .def("set_reduce",
             [](ScaleTable& table, py::function function) { table.set_reduce(with_gil<const at::Tensor&>(function)); })
        .def("begin_cast", &ScaleTable::begin_cast, py::arg("column"), unlocked)
        .def("end_cast", &ScaleTable::end_cast, py::arg("column"), unlocked)
        .def(
            "update_if_due", [](ScaleTable& table) { table.update_if_due(); }, unlocked)
        .def("hold_updates", &ScaleTable::hold_updates)
        .def("release_updates", &ScaleTable::release_updates)
        .def("is_due", &ScaleTable::is_due, py::arg("column"), unlocked)
        .def("set_due", &ScaleTable::set_due, py::arg("column"), py::arg("is_due"), unlocked);
    py::class_<CastDone, std::shared_ptr<CastDone>>(m, "CastDone").def(py::init<c10::Device>(), py::arg("device"));
    py::class_<LinearProducts, std::shared_ptr<LinearProducts>>(m, "LinearProducts")
        .def(py::init([](at::Tensor weight, at::Tensor weight_t, at::Tensor weight_scale_inv, bool inputs_first,
                         TablePointer forward, int64_t input_column, int64_t weight_column, TablePointer backward,
                         int64_t grad_column, at::ScalarType grad_dtype, py::object columns) {
                 return std::make_shared<LinearProducts>(
                     std::move(weight), std::move(weight_t), std::move(weight_scale_inv), inputs_first,
                     ScaleColumn{forward, input_column}, ScaleColumn{forward, weight_column},
                     ScaleColumn{std::move(backward), grad_column}, grad_dtype, held_on_any_thread(std::move(columns)));
             }),
             py::arg("weight"), py::arg("weight_t"), py::arg("weight_scale_inv"), py::arg("inputs_first"),
             py::arg("forward"), py::arg("input_column"), py::arg("weight_column"), py::arg("backward"),
             py::arg("grad_column"), py::arg("grad_dtype"), py::arg("columns"))
        .def("set_cast_weights",
             [](LinearProducts& products, py::function function) {
                 products.set_cast_weights(with_gil<const at::Tensor&, bool>(std::move(function)));
             })
        .def("set_cast_again",
             [](LinearProducts& products, py::function function) {
                 products.set_cast_again(
                     with_gil<const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<WeightMark>&>(
                         std::move(function)));
             })
        .def("note_repeated_cast", &LinearProducts::note_repeated_cast, py::arg("weight"), py::arg("scale"))
        .def("set_main_grad_of",
             [](LinearProducts& products, py::function function) {
                 products.set_main_grad_of([held = held_on_any_thread(std::move(function))](const at::Tensor& weight) {
                     const py::gil_scoped_acquire gil;
                     return (*held)(weight).cast<std::pair<at::Tensor, std::shared_ptr<MainGradReset>>>();
                 });
             })
        .def("is_cast", &LinearProducts::is_cast, py::arg("weight"), py::arg("records_amax"))
        .def("is_noted", &LinearProducts::is_noted)
        .def("holds", &LinearProducts::holds, py::arg("weight"))
        .def_property_readonly("cast_number", &LinearProducts::cast_number)
        .def_property(
            "recorded",
            [](const LinearProducts& products) {
                LinearProducts::Recorded recorded = products.recorded();
                return std::make_pair(std::move(recorded.mark), recorded.number);
            },
            [](LinearProducts& products, std::pair<std::optional<WeightMark>, std::optional<int64_t>> recorded) {
                products.set_recorded({std::move(recorded.first), recorded.second});
            })
        .def_property("trains", &LinearProducts::trains, &LinearProducts::set_trains)
        .def_property("thread", &LinearProducts::thread, &LinearProducts::set_thread)
        .def("has_recorded_amax", &LinearProducts::has_recorded_amax, py::arg("weight"))
        .def(
            "note_cast",
            [](LinearProducts& products, const WeightMark& mark, bool is_recorded, std::shared_ptr<CastDone> done,
               std::optional<int64_t> repeated) { products.note_cast(mark, is_recorded, std::move(done), repeated); },
            py::arg("mark"), py::arg("is_recorded"), py::arg("done"), py::arg("repeated"))
        .def("note_scales_read_elsewhere", &LinearProducts::note_scales_read_elsewhere, unlocked)
        .def("begin_captured_cast", &LinearProducts::begin_captured_cast, py::arg("records_amax"), unlocked)
        .def("note_captured_cast", &LinearProducts::note_captured_cast, py::arg("weight"), py::arg("records_amax"),
             py::arg("is_recorded"), py::arg("repeated"))
        .def("begin_input_cast", &LinearProducts::begin_input_cast, py::arg("records_amax"), unlocked)
        .def("set_fast_region", &LinearProducts::set_fast_region, py::arg("number"))
        .def("forward", &LinearProducts::forward, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("dtype"),
             py::arg("records_amax"), py::arg("scale"), unlocked);
    using MaybeTensor = std::optional<at::Tensor>;
    py::class_<CastAlone>(m, "CastAlone").def(py::init<>());
    py::class_<FusedNorm>(m, "FusedNorm")
        .def(py::init<at::Tensor, MaybeTensor, double, bool, bool>(), py::arg("weight"), py::arg("bias"),
             py::arg("eps"), py::arg("rms_norm"), py::arg("zero_centered"));
    py::class_<FusedActivation>(m, "FusedActivation")
        .def(py::init<std::string, bool>(), py::arg("name"), py::arg("gated"));
    py::class_<FusedStage>(m, "FusedStage")
        .def(py::init<Producer, std::shared_ptr<LinearProducts>, at::Tensor, MaybeTensor, MaybeTensor>(),
             py::arg("producer"), py::arg("products"), py::arg("weight"), py::arg("bias"), py::arg("scale"));
    m.def("fused_products", &fused_products, py::arg("x"), py::arg("residual"), py::arg("stages"), py::arg("dtype"),
          py::arg("records_amax"), unlocked);
    py::class_<WeightMark>(m, "WeightMark")
        .def(py::init<>())
        .def(py::init<const at::Tensor&>(), py::arg("weight"))
        .def("is_of", &WeightMark::is_of, py::arg("weight"))
        .def("is_of_storage", &WeightMark::is_of_storage, py::arg("weight"));
    m.def("set_fp8_region", &set_region, py::arg("number"));
    m.def("fp8_region", &region);
    m.def("note_fp8_call", &note_call, py::arg("began_before"));
    m.def(
        "note_fp8_region_exit",
        [](bool is_inside) { CapturedColumns::note_region_exit(*HostSteps::current(), is_inside); },
        py::arg("is_inside"));
    m.def("fp8_gemm_plans", [] {
        py::list plans;
        for (const GemmPlanInfo& info : gemm_plans()) plans.append(as_dict(info));
        return plans;
    });
    using Tensors = WeightTable::Tensors;
    py::class_<WeightTable>(m, "WeightTable")
        .def(py::init([](Tensors weights, Tensors out, Tensors out_t, at::Tensor scale, at::Tensor scale_inv,
                         at::Tensor amax, const std::optional<at::Tensor>& counts, std::vector<std::string> names) {
                 return std::make_unique<WeightTable>(std::move(weights), std::move(out), std::move(out_t),
                                                      std::move(scale), std::move(scale_inv), std::move(amax),
                                                      counts.value_or(at::Tensor()), std::move(names));
             }),
             py::arg("weights"), py::arg("out"), py::arg("out_t"), py::arg("scale"), py::arg("scale_inv"),
             py::arg("amax"), py::arg("counts"), py::arg("names"))
        .def("cast", &WeightTable::cast, py::arg("noop"), py::arg("is_done"))
        .def("stale", &WeightTable::stale)
        .def("check_places", &WeightTable::check_places)
        .def("update", &WeightTable::update, py::arg("weights"))
        .def("weights", &WeightTable::weights)
        .def("tables", &WeightTable::tables);
}

}  // namespace te_graph::fp8
