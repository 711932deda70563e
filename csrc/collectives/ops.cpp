// Registration of the collectives.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "collectives/group.h"
#include "common/arguments_apart.h"
#include "common/check.h"
#include "common/note_writes.h"

namespace te_graph::collectives {
namespace {

constexpr const char* kAllReduceOp = "all_reduce";
constexpr const char* kAllReduceInplace = "all_reduce_";
constexpr const char* kAllReduceOut = "all_reduce_out";
constexpr const char* kReduceScatterOp = "reduce_scatter";
constexpr const char* kReduceScatterOut = "reduce_scatter_out";
constexpr const char* kAllGatherOp = "all_gather";
constexpr const char* kAllGatherOut = "all_gather_out";

// tensor: [...].
void check_plain(const char* op, const char* argument, const at::Tensor& tensor) {
    check_strided(op, argument, tensor);
    TORCH_CHECK_TYPE(!tensor.is_quantized(), op, ": expected ", argument, " that is not quantized, got ",
                     tensor.scalar_type());
}

// x: [...].
Reduction reduction_of(const char* op, const at::Tensor& x, c10::string_view name) {
    TORCH_CHECK_VALUE(name == "sum" || name == "max", op, ": expected reduction 'sum' or 'max', got '", name, "'");
    TORCH_CHECK_TYPE(element_of(x.scalar_type()) != Element::kBytes, op,
                     ": expected x of dtype torch.float32, torch.float16 or torch.bfloat16, got ",
                     dtype_name(x.scalar_type()));
    TORCH_CHECK_TYPE(name == "sum" || x.scalar_type() == at::kFloat, op,
                     ": expected x of dtype torch.float32 for 'max', got ", dtype_name(x.scalar_type()));
    return name == "sum" ? Reduction::kSum : Reduction::kMax;
}

// x: [...], not a scalar.
int64_t dim_of(const char* op, const at::Tensor& x, int64_t dim) {
    TORCH_CHECK_VALUE(x.dim() > 0, op, ": expected x of at least one dimension, got a scalar");
    TORCH_CHECK_INDEX(-x.dim() <= dim && dim < x.dim(), op, ": expected dim from ", -x.dim(), " to ", x.dim() - 1,
                      ", got ", dim);
    return dim < 0 ? dim + x.dim() : dim;
}

// x: [...].
std::shared_ptr<const Group> group_of(const char* op, const at::Tensor& x, const std::string& name,
                                      std::optional<int64_t> world_size = {}) {
    auto group = find_group(op, name);
    check_plain(op, "x", x);
    TORCH_CHECK_VALUE(x.device() == group->device, op, ": expected x on ", group->device, ", where group '", name,
                      "' is, got ", x.device());
    TORCH_CHECK_VALUE(!world_size || *world_size == group->world, op, ": expected world_size ", group->world,
                      " of group '", name, "', got ", world_size.value_or(0));
    return group;
}

// What is written, tensor [...], has a place for each element.
void check_written(const char* op, const char* argument, const at::Tensor& tensor) {
    check_writable(op, argument, tensor);
    check_elements_apart(op, argument, tensor);
}

// out: [shape]; x: [...].
void check_out(const char* op, const at::Tensor& out, const at::Tensor& x, at::IntArrayRef shape) {
    check_plain(op, "out", out);
    check_dtype(op, "out", out, x.scalar_type());
    check_device(op, "out", out, x.device());
    TORCH_CHECK_VALUE(out.sizes() == shape, op, ": expected out of shape ", shape, ", got ", out.sizes());
    check_written(op, "out", out);
}

// Fills out [...], of any strides, with what function(contiguous tensor) writes.
template <typename Function>
void write_to(const at::Tensor& out, const Function& function) {
    if (out.is_contiguous()) return function(out);
    const at::Tensor result = at::empty(out.sizes(), out.options());
    function(result);
    out.copy_(result);
}

// x [...] -> [...], what an op reads while it writes out [...]: contiguous, and apart from `out` unless they are one.
at::Tensor input_beside(const at::Tensor& x, const at::Tensor& out, bool may_be_one) {
    const at::Tensor input = x.contiguous();
    if (!share_memory(input, out)) return input;
    return may_be_one && input.const_data_ptr() == out.const_data_ptr() ? input : input.clone();
}

// x: [...]; out: [...] contiguous.
Operation all_reduce_of(const char* op, Reduction reduction, const at::Tensor& x, const at::Tensor& out) {
    return {op, Op::kAllReduce, reduction, input_beside(x, out, true), out, {x.numel()}};
}

at::Tensor all_reduce(const at::Tensor& x,  // [...]
                      std::string name, std::string reduction) {
    const auto group = group_of(kAllReduceOp, x, name);
    const Reduction how = reduction_of(kAllReduceOp, x, reduction);
    const at::Tensor out = at::empty(x.sizes(), x.options());
    group->transport->run(all_reduce_of(kAllReduceOp, how, x, out));
    return out;
}

void all_reduce_inplace(const at::Tensor& x,  // [...]
                        std::string name, std::string reduction) {
    const auto group = group_of(kAllReduceInplace, x, name);
    const Reduction how = reduction_of(kAllReduceInplace, x, reduction);
    check_written(kAllReduceInplace, "x", x);
    write_to(x, [&](const at::Tensor& out) { group->transport->run(all_reduce_of(kAllReduceInplace, how, x, out)); });
    note_write(x);
}

// scale_tensor: [] or [1].
void check_scale(const char* op, const Group& group, Reduction reduction, double scale,
                 const MaybeTensor& scale_tensor) {
    TORCH_CHECK_VALUE(reduction == Reduction::kSum || (scale == 1.0 && !scale_tensor), op,
                      ": expected a scale with reduction 'sum' only, got one with 'max'");
    if (!scale_tensor) return;
    check_one(op, "scale", *scale_tensor, group.device);
    check_dtype(op, "scale", *scale_tensor, at::kFloat);
}
// Whether x [...] is sent as bf16.
bool sends_bf16(const char* op, const at::Tensor& x, Reduction reduction, std::optional<at::ScalarType> wire_dtype) {
    if (!wire_dtype || *wire_dtype == x.scalar_type()) return false;
    TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat && *wire_dtype == at::kBFloat16, op,
                     ": expected as wire_dtype the dtype of x, or torch.bfloat16 for torch.float32, got ",
                     dtype_name(*wire_dtype), " for ", dtype_name(x.scalar_type()));
    TORCH_CHECK_VALUE(reduction == Reduction::kSum, op,
                      ": expected another wire_dtype with reduction 'sum' only, got one with 'max'");
    return true;
}
// scale_tensor: [] or [1], maybe a part of the output.
Operation with(Operation operation, double scale, const MaybeTensor& scale_tensor, bool sends_bf16) {
    operation.scale = scale;
    operation.sends_bf16 = sends_bf16;
    if (scale_tensor) {
        operation.scale_tensor = share_memory(*scale_tensor, operation.out) ? scale_tensor->clone() : *scale_tensor;
    }
    return operation;
}

void all_reduce_out(const at::Tensor& out,  // [...]
                    const at::Tensor& x,    // [...]
                    std::string name, std::string reduction, double scale,
                    const MaybeTensor& scale_tensor,  // [] or [1]
                    std::optional<at::ScalarType> wire_dtype) {
    const auto group = group_of(kAllReduceOut, x, name);
    const Reduction how = reduction_of(kAllReduceOut, x, reduction);
    check_out(kAllReduceOut, out, x, x.sizes());
    check_scale(kAllReduceOut, *group, how, scale, scale_tensor);
    const bool narrows = sends_bf16(kAllReduceOut, x, how, wire_dtype);
    write_to(out, [&](const at::Tensor& place) {
        group->transport->run(with(all_reduce_of(kAllReduceOut, how, x, place), scale, scale_tensor, narrows));
    });
    note_write(out);
}

// Of an operation along a dim of x [...]. Those without elements are all alike.
Extents extents_of(const at::Tensor& x, int64_t dim) {
    if (x.numel() == 0) return {0};
    const at::IntArrayRef sizes = x.sizes();
    return {x.numel(), dim, c10::multiply_integers(sizes.slice(0, dim)), c10::multiply_integers(sizes.slice(dim + 1))};
}

// The shape of the result for x [..., world * n, ...]: [..., n, ...].
std::vector<int64_t> scattered_shape(const char* op, const at::Tensor& x, int64_t dim, int64_t world) {
    TORCH_CHECK_VALUE(x.size(dim) % world == 0, op, ": expected x of a size in dim ", dim, " that ", world,
                      " ranks can share, got ", x.size(dim));
    std::vector<int64_t> shape = x.sizes().vec();
    shape[dim] /= world;
    return shape;
}
// The shape of the result for x [..., n, ...]: [..., world * n, ...].
std::vector<int64_t> gathered_shape(const at::Tensor& x, int64_t dim, int64_t world) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape[dim] *= world;
    return shape;
}

// tensor [..., world * n, ...] -> [world, ..., n, ...], a view of it: contiguous where dim is the first one of more
// than one element.
at::Tensor parts_of_ranks(const at::Tensor& tensor, int64_t dim, int64_t world) {
    return tensor.unflatten(dim, {world, tensor.size(dim) / world}).movedim(dim, 0);
}

// Whether `part` [..., n, ...] is where this rank's one among `parts` [world, ..., n, ...] is.
bool is_own_part(const at::Tensor& parts, const Group& group, const at::Tensor& part) {
    return parts.is_contiguous() && part.is_contiguous() && parts.numel() > 0 &&
           parts.select(0, group.rank).const_data_ptr() == part.const_data_ptr();
}

Operation reduce_scatter_of(const char* op, Reduction reduction,
                            const at::Tensor& x,  // [..., world * n, ...]
                            int64_t dim, const Group& group,
                            const at::Tensor& out)  // [..., n, ...] contiguous
{
    const at::Tensor parts = parts_of_ranks(x, dim, group.world);
    // Kernels read a word of this rank's own part just before they write that of the output (low_latency.cuh).
    const at::Tensor input = is_own_part(parts, group, out) ? parts : input_beside(parts, out, false);
    return {op, Op::kReduceScatter, reduction, input, out, extents_of(x, dim)};
}

at::Tensor reduce_scatter(const at::Tensor& x,  // [..., world * n, ...] -> [..., n, ...]
                          int64_t dim, int64_t world_size, std::string name, std::string reduction) {
    const auto group = group_of(kReduceScatterOp, x, name, world_size);
    const Reduction how = reduction_of(kReduceScatterOp, x, reduction);
    dim = dim_of(kReduceScatterOp, x, dim);
    const at::Tensor out = at::empty(scattered_shape(kReduceScatterOp, x, dim, world_size), x.options());
    group->transport->run(reduce_scatter_of(kReduceScatterOp, how, x, dim, *group, out));
    return out;
}

void reduce_scatter_out(const at::Tensor& out,  // [..., n, ...]
                        const at::Tensor& x,    // [..., world * n, ...]
                        int64_t dim, int64_t world_size, std::string name, std::string reduction, double scale,
                        const MaybeTensor& scale_tensor,  // [] or [1]
                        std::optional<at::ScalarType> wire_dtype) {
    const auto group = group_of(kReduceScatterOut, x, name, world_size);
    const Reduction how = reduction_of(kReduceScatterOut, x, reduction);
    dim = dim_of(kReduceScatterOut, x, dim);
    check_out(kReduceScatterOut, out, x, scattered_shape(kReduceScatterOut, x, dim, world_size));
    check_scale(kReduceScatterOut, *group, how, scale, scale_tensor);
    const bool narrows = sends_bf16(kReduceScatterOut, x, how, wire_dtype);
    write_to(out, [&](const at::Tensor& place) {
        group->transport->run(
            with(reduce_scatter_of(kReduceScatterOut, how, x, dim, *group, place), scale, scale_tensor, narrows));
    });
    note_write(out);
}

Operation all_gather_of(const char* op,
                        const at::Tensor& x,  // [..., n, ...]
                        int64_t dim, const Group& group,
                        const at::Tensor& parts)  // [world, ..., n, ...] contiguous
{
    // Kernels write a word of this rank's own part where they have read it, those of peers into the other parts.
    const at::Tensor input = is_own_part(parts, group, x) ? x : input_beside(x, parts, false);
    return {op, Op::kAllGather, Reduction::kSum, input, parts, extents_of(x, dim)};
}

at::Tensor all_gather(const at::Tensor& x,  // [..., n, ...] -> [..., world * n, ...]
                      int64_t dim, int64_t world_size, std::string name) {
    const auto group = group_of(kAllGatherOp, x, name, world_size);
    dim = dim_of(kAllGatherOp, x, dim);
    const at::Tensor out = at::empty(gathered_shape(x, dim, world_size), x.options());
    write_to(parts_of_ranks(out, dim, world_size), [&](const at::Tensor& parts) {
        group->transport->run(all_gather_of(kAllGatherOp, x, dim, *group, parts));
    });
    return out;
}

void all_gather_out(const at::Tensor& out,  // [..., world * n, ...]
                    const at::Tensor& x,    // [..., n, ...]
                    int64_t dim, int64_t world_size, std::string name) {
    const auto group = group_of(kAllGatherOut, x, name, world_size);
    dim = dim_of(kAllGatherOut, x, dim);
    check_out(kAllGatherOut, out, x, gathered_shape(x, dim, world_size));
    write_to(parts_of_ranks(out, dim, world_size), [&](const at::Tensor& parts) {
        group->transport->run(all_gather_of(kAllGatherOut, x, dim, *group, parts));
    });
    note_write(out);
}

// Shapes alone, for torch.compile and fake tensors.

// x [...] -> [...].
at::Tensor all_reduce_meta(const at::Tensor& x, std::string, std::string) {
    return at::empty_symint(x.sym_sizes(), x.options());
}
// The shape of the result for x [..., world * n, ...]: [..., n, ...].
std::vector<c10::SymInt> scattered_shape_meta(const char* op, const at::Tensor& x, int64_t dim, int64_t world) {
    dim = dim_of(op, x, dim);
    std::vector<c10::SymInt> shape = x.sym_sizes().vec();
    TORCH_CHECK_VALUE((shape[dim] % world).sym_eq(0).expect_true(__FILE__, __LINE__), op,
                      ": expected x of a size in dim ", dim, " that ", world, " ranks can share, got ", shape[dim]);
    shape[dim] = shape[dim] / world;
    return shape;
}
// The shape of the result for x [..., n, ...]: [..., world * n, ...].
std::vector<c10::SymInt> gathered_shape_meta(const char* op, const at::Tensor& x, int64_t dim, int64_t world) {
    std::vector<c10::SymInt> shape = x.sym_sizes().vec();
    shape[dim_of(op, x, dim)] *= world;
    return shape;
}
// x [..., world * n, ...] -> [..., n, ...].
at::Tensor reduce_scatter_meta(const at::Tensor& x, int64_t dim, int64_t world_size, std::string, std::string) {
    return at::empty_symint(scattered_shape_meta(kReduceScatterOp, x, dim, world_size), x.options());
}
// x [..., n, ...] -> [..., world * n, ...].
at::Tensor all_gather_meta(const at::Tensor& x, int64_t dim, int64_t world_size, std::string) {
    return at::empty_symint(gathered_shape_meta(kAllGatherOp, x, dim, world_size), x.options());
}
// out: [shape]; x: [...]. Traced as a copy, which would take other shapes as well.
void check_out_meta(const char* op, const at::Tensor& out, const at::Tensor& x, c10::SymIntArrayRef shape) {
    check_dtype(op, "out", out, x.scalar_type());
    check_device(op, "out", out, x.device());
    const c10::SymIntArrayRef found = out.sym_sizes();
    bool is_of_shape = found.size() == shape.size();
    for (size_t d = 0; is_of_shape && d < shape.size(); ++d) {
        is_of_shape = found[d].sym_eq(shape[d]).expect_true(__FILE__, __LINE__);
    }
    TORCH_CHECK_VALUE(is_of_shape, op, ": expected out of shape ", shape, ", got ", found);
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kAllReduceOp, all_reduce);
    m.impl(kAllReduceInplace, all_reduce_inplace);
    m.impl(kAllReduceOut, all_reduce_out);
    m.impl(kReduceScatterOp, reduce_scatter);
    m.impl(kReduceScatterOut, reduce_scatter_out);
    m.impl(kAllGatherOp, all_gather);
    m.impl(kAllGatherOut, all_gather_out);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kAllReduceOp, all_reduce_meta);
    m.impl(kAllReduceInplace, [](const at::Tensor&, std::string, std::string) {});
    m.impl(kAllReduceOut,
           [](const at::Tensor& out, const at::Tensor& x, std::string, std::string, double, const MaybeTensor&,
              std::optional<at::ScalarType>) { check_out_meta(kAllReduceOut, out, x, x.sym_sizes()); });
    m.impl(kReduceScatterOp, reduce_scatter_meta);
    m.impl(kReduceScatterOut, [](const at::Tensor& out, const at::Tensor& x, int64_t dim, int64_t world_size,
                                 std::string, std::string, double, const MaybeTensor&, std::optional<at::ScalarType>) {
        check_out_meta(kReduceScatterOut, out, x, scattered_shape_meta(kReduceScatterOut, x, dim, world_size));
    });
    m.impl(kAllGatherOp, all_gather_meta);
    m.impl(kAllGatherOut, [](const at::Tensor& out, const at::Tensor& x, int64_t dim, int64_t world_size, std::string) {
        check_out_meta(kAllGatherOut, out, x, gathered_shape_meta(kAllGatherOut, x, dim, world_size));
    });
}

}  // namespace te_graph::collectives
