// What Python code has at hand besides the ops: lists of tensors that stay in C++ from one op to the next, and calls
// that take the tensors of a sequence apart and work on them at once.
#include "multi_tensor/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/no_derivative.h"
#include "multi_tensor/check_distinct.h"
#include "multi_tensor/dispatched_op.h"
#include "multi_tensor/exact_sum.h"
#include "multi_tensor/operands.h"
#include "multi_tensor/ops.h"
#include "multi_tensor/scale.h"
#include "multi_tensor/tensor_sequence.h"

namespace py = pybind11;

namespace te_graph::multi_tensor {
namespace {

constexpr const char* kUpdate = "update_hp_grads";

// tensor: [...]. Subclasses and tensors of other kinds are for Python to take apart.
bool is_plain(const at::Tensor& tensor) {
    return !tensor.key_set().has(c10::DispatchKey::Python) && !tensor.is_complex();
}

// Tensors of one device.
struct TensorList {
    std::vector<at::Tensor> tensors;  // [...] each

    bool is_plain() const { return std::all_of(tensors.begin(), tensors.end(), multi_tensor::is_plain); }
    at::Device device() const { return tensors.front().device(); }
    bool has_double() const {
        for (const at::Tensor& tensor : tensors) {
            if (tensor.scalar_type() == at::kDouble) return true;
        }
        return false;
    }
    // -> [].
    at::Tensor norm(double p) const {
        static const DispatchedOp<at::Tensor, at::TensorList, double> op("te_graph::multi_tensor_norm");
        return op(tensors, p);
    }
    // -> [kPartialWords].
    at::Tensor norm_partial(double p) const {
        static const DispatchedOp<at::Tensor, at::TensorList, double> op("te_graph::multi_tensor_norm_partial");
        return op(tensors, p);
    }
    void clip(const at::Tensor& total_norm,  // [] or [1]
              double max_norm, double eps,
              const MaybeTensor& found_inf) const  // [] or [1]
    {
        static const DispatchedOp<void, at::TensorList, const at::Tensor&, double, double, const MaybeTensor&> op(
            "te_graph::multi_tensor_clip_");
        op(tensors, total_norm, max_norm, eps, found_inf);
    }
    // Raises if autograd tracks a tensor that `op` would write: results that require a gradient, tangents.
    void check_not_followed(const char* op) const {
        const bool is_recorded = at::GradMode::is_enabled();
        for (const at::Tensor& tensor : tensors) {
            TORCH_CHECK_NOT_IMPLEMENTED(!is_followed(*tensor.unsafeGetTensorImpl(), is_recorded), op,
                                        ": has no derivative, and autograd tracks a tensor that it writes; call it ",
                                        "under torch.no_grad() or give it tensor.detach()");
        }
    }

    // Raise what the methods of these names would raise, and write nothing.
    void check_clip(const at::Tensor& total_norm,  // [] or [1]
                    double max_norm, double eps,
                    const MaybeTensor& found_inf) const  // [] or [1]
    {
        if (is_plain()) multi_tensor::check_clip(tensors, total_norm, max_norm, eps, found_inf);
    }
    void check_destinations(bool is_written,
                            const MaybeTensor& sum_squares,  // [kPartialWords]
                            const MaybeTensor& found_inf,    // [] or [1]
                            const MaybeTensor& noop) const   // [] or [1]
    {
        if (is_plain()) multi_tensor::check_destinations(tensors, is_written, sum_squares, found_inf, noop);
    }
    void check_accumulate(const TensorList& sources,  // [...] each
                          bool store, bool zero_source,
                          const MaybeTensor& sum_squares,  // [kPartialWords]
                          const MaybeTensor& found_inf,    // [] or [1]
                          const MaybeTensor& noop) const   // [] or [1]
    {
        if (!is_plain() || !sources.is_plain()) return;
        multi_tensor::check_accumulate(tensors, sources.tensors, store, zero_source, sum_squares, found_inf, noop);
    }

    void zero() const {
        static const DispatchedOp<void, at::TensorList> op("te_graph::multi_tensor_zero_");
        op(tensors);
    }
    void accumulate(const TensorList& sources,  // [...] each
                    bool store, bool zero_source,
                    const MaybeTensor& sum_squares,  // [kPartialWords]
                    const MaybeTensor& found_inf,    // [] or [1]
                    const MaybeTensor& noop) const   // [] or [1]
    {
        static const DispatchedOp<void, at::TensorList, at::TensorList, bool, bool, const MaybeTensor&,
                                  const MaybeTensor&, const MaybeTensor&, const MaybeTensor&>
            op("te_graph::multi_tensor_accumulate_");
        op(tensors, sources.tensors, store, zero_source, std::nullopt, sum_squares, found_inf, noop);
    }
};

// tensor [...] -> [...], its .grad. Not grad(), which warns of tensors that are not leaves.
const at::Tensor& grad_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->grad(); }

// The list of `lists` whose device is `device`, made if there is none.
template <typename List>
List& list_for(std::vector<List>& lists, at::Device device) {
    for (List& list : lists) {
        if (list.device() == device) return list;
    }
    return lists.emplace_back();
}

// The tensors of a sequence (of gradients=true: their .grad where there is one), [...] each, by device. None if any is
// not plain.
std::optional<std::vector<TensorList>> collect(const py::sequence& sequence, bool gradients) {
    const TensorSequence items(sequence, "te_graph", gradients ? "parameters" : "tensors");
    // Owning a tensor is an atomic operation, which waits for all loads before it. So what it needs is looked at first.
    std::vector<const at::Tensor*> found;
    found.reserve(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
        const at::Tensor& tensor = items[i];
        if (!is_plain(tensor)) return std::nullopt;
        const at::Tensor& wanted = gradients ? grad_of(tensor) : tensor;
        if (!wanted.defined()) continue;
        __builtin_prefetch(wanted.unsafeGetTensorImpl());
        found.push_back(&wanted);
    }
    std::vector<TensorList> lists;
    for (const at::Tensor* tensor : found) {
        if (!is_plain(*tensor)) return std::nullopt;
        __builtin_prefetch(tensor->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
    for (const at::Tensor* tensor : found) {
        if (lists.size() == 1 && lists[0].device() == tensor->device()) {
            lists[0].tensors.push_back(*tensor);
        } else {
            TensorList& list = list_for(lists, tensor->device());
            if (list.tensors.empty()) list.tensors.reserve(found.size());
            list.tensors.push_back(*tensor);
        }
    }
    return lists;
}

// Gradients that cannot be dropped while this thread holds the GIL, without owning them.
class BorrowedList {
public:
    explicit BorrowedList(size_t capacity) { tensors_.reserve(capacity); }
    BorrowedList(const BorrowedList&) = delete;
    BorrowedList& operator=(const BorrowedList&) = delete;
    ~BorrowedList() {
        for (at::Tensor& tensor : tensors_) Borrowing::destroyBorrow(tensor);
    }
    // tensor: [...].
    void add(const at::Tensor& tensor) { tensors_.push_back(Borrowing::createBorrow(tensor)); }
    at::TensorList tensors() const { return tensors_; }  // [...] each

private:
    using Borrowing = c10::MaybeOwnedTraits<at::Tensor>;
    std::vector<at::Tensor> tensors_;
};

// Clips the gradients of parameters if all are plain and on one device, and returns their norm []; None if they are
// not. Holds the GIL throughout.
std::optional<at::Tensor> clip_plain_gradients(const py::sequence& parameters, double max_norm, double p,
                                               const MaybeTensor& found_inf)  // [] or [1]
{
    const TensorSequence items(parameters, "clip_grad_norm_", "parameters");
    BorrowedList list(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
        const at::Tensor &tensor = items[i], &grad = grad_of(tensor);
        if (!is_plain(tensor)) return std::nullopt;
        if (!grad.defined()) continue;
        if (!is_plain(grad)) return std::nullopt;
        list.add(grad);
    }
    const at::TensorList tensors = list.tensors();
    for (const at::Tensor& tensor : tensors) {
        if (tensor.device() != tensors[0].device()) return std::nullopt;
    }
    if (tensors.empty()) return std::nullopt;
    static const DispatchedOp<at::Tensor, at::TensorList, double, double, const MaybeTensor&> op(
        "te_graph::multi_tensor_clip_norm_");
    return op(tensors, max_norm, p, found_inf);
}

// Raises if `op` would change memory twice, or change what it reads, in several lists together.
void check_distinct_lists(const char* op, const std::vector<const TensorList*>& written,
                          const std::vector<const TensorList*>& read) {
    const auto all = [](const std::vector<const TensorList*>& lists) {
        std::vector<at::Tensor> tensors;
        for (const TensorList* list : lists) {
            if (list->is_plain()) tensors.insert(tensors.end(), list->tensors.begin(), list->tensors.end());
        }
        return tensors;
    };
    check_distinct(op, all(written), all(read));
}

// What update_hp_grads works on, of one device.
struct GradientPairs {
    TensorList destinations, sources, unused;  // unused: destinations whose parameter has no gradient

    at::Device device() const { return destinations.tensors.empty() ? unused.device() : destinations.device(); }
};

// Raises unless hp_grads[i] is for this gradient: elements go by their order, which is another one in a transposed or
// reshaped tensor. grad, destination: [...].
void check_shapes_fit(size_t i, const at::Tensor& grad, const at::Tensor& destination) {
    const bool is_flat = grad.dim() == 1 || destination.dim() == 1;
    TORCH_CHECK_VALUE(is_flat ? grad.numel() == destination.numel() : grad.sizes() == destination.sizes(), kUpdate,
                      ": expected hp_grads[", i, "] of shape ", grad.sizes(), " or flat, got ", destination.sizes());
}

// The gradients of parameters with their destinations, by device. None if any is not plain.
std::optional<std::vector<GradientPairs>> collect_pairs(const py::sequence& parameters, const py::sequence& hp_grads) {
    const TensorSequence from(parameters, kUpdate, "lp_params"), to(hp_grads, kUpdate, "hp_grads");
    std::vector<GradientPairs> pairs;
    for (size_t i = 0; i < from.size(); ++i) {
        const at::Tensor &parameter = from[i], &destination = to[i], &grad = grad_of(parameter);
        if (!is_plain(parameter) || !is_plain(destination) || (grad.defined() && !is_plain(grad))) return std::nullopt;
        if (grad.defined()) check_shapes_fit(i, grad, destination);
        GradientPairs& list = list_for(pairs, destination.device());
        (grad.defined() ? list.destinations : list.unused).tensors.push_back(destination);
        if (grad.defined()) list.sources.tensors.push_back(grad);
    }
    return pairs;
}

}  // namespace

void bind(py::module_& m) {
    m.attr("NORM_PARTIAL_WORDS") = kPartialWords;
    m.attr("CLIP_EPS") = kClipEps;
    bind_plan(m);
    m.def("collect", &collect, py::arg("sequence"), py::arg("gradients"));
    m.def("clip_plain_gradients", &clip_plain_gradients, py::arg("parameters"), py::arg("max_norm"), py::arg("p"),
          py::arg("found_inf"));
    m.def("check_distinct", &check_distinct_lists, py::arg("op"), py::arg("written"), py::arg("read"));
    m.def("collect_pairs", &collect_pairs, py::arg("parameters"), py::arg("hp_grads"));

    py::class_<GradientPairs>(m, "GradientPairs")
        .def_readonly("destinations", &GradientPairs::destinations)
        .def_readonly("sources", &GradientPairs::sources)
        .def_readonly("unused", &GradientPairs::unused);

    py::class_<TensorList>(m, "TensorList")
        .def(py::init([](std::vector<at::Tensor> tensors) { return TensorList{std::move(tensors)}; }),
             py::arg("tensors"))
        .def_property_readonly("device", &TensorList::device)
        .def_property_readonly("has_double", &TensorList::has_double)
        .def("__len__", [](const TensorList& list) { return list.tensors.size(); })
        .def_readonly("tensors", &TensorList::tensors)
        .def("norm", &TensorList::norm, py::arg("p"), py::call_guard<py::gil_scoped_release>())
        .def("norm_partial", &TensorList::norm_partial, py::arg("p"), py::call_guard<py::gil_scoped_release>())
        .def("zero_", &TensorList::zero, py::call_guard<py::gil_scoped_release>())
        .def("accumulate_", &TensorList::accumulate, py::arg("sources"), py::arg("store"), py::arg("zero_source"),
             py::arg("sum_squares"), py::arg("found_inf"), py::arg("noop"), py::call_guard<py::gil_scoped_release>())
        .def("check_destinations", &TensorList::check_destinations, py::arg("is_written"), py::arg("sum_squares"),
             py::arg("found_inf"), py::arg("noop"))
        .def("check_accumulate", &TensorList::check_accumulate, py::arg("sources"), py::arg("store"),
             py::arg("zero_source"), py::arg("sum_squares"), py::arg("found_inf"), py::arg("noop"))
        .def("check_clip", &TensorList::check_clip, py::arg("total_norm"), py::arg("max_norm"), py::arg("eps"),
             py::arg("found_inf"))
        .def("check_not_followed", &TensorList::check_not_followed, py::arg("op"))
        .def("clip_", &TensorList::clip, py::arg("total_norm"), py::arg("max_norm"), py::arg("eps"),
             py::arg("found_inf"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace te_graph::multi_tensor
