// Everything that te_graph registers, on one page: the schemas of all ops and the extension module.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "graph/bindings.h"
#include "multi_tensor/bindings.h"

// Mutated arguments are marked (a!); ops that mutate return ().
TORCH_LIBRARY(te_graph, m) {
    const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
    const auto def = [&](const char* schema) { m.def(schema, tags); };

    // Norms of lists: any shapes, fp32, fp64, fp16 and bf16 mixed. Results are fp32, fp64 if the list has fp64 tensors.
    // p: 0 (number of elements that are not zero), positive or inf. partial: [72] int64 (csrc/multi_tensor/exact_sum.h),
    // exact: those of several lists are added (p = inf: joined by max), on one device or by all_reduce.
    def("multi_tensor_norm(Tensor[] tensors, float p=2.0) -> Tensor");
    def("multi_tensor_norm_partial(Tensor[] tensors, float p=2.0) -> Tensor");
    def("multi_tensor_norm_finish(Tensor partial, float p=2.0, ScalarType dtype=float) -> Tensor");
    def("multi_tensor_norms(Tensor[] tensors, float p=2.0) -> Tensor");

    // In place. clip_norm_: norm and clip in one, returns the norm. total_norm, scale, found_inf, noop: [] or [1], fp32 (total_norm and scale also fp64).
    def("multi_tensor_clip_(Tensor(a!)[] tensors, Tensor total_norm, float max_norm, *, float eps=1e-06, "
        "Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_clip_norm_(Tensor(a!)[] tensors, float max_norm, float p=2.0, *, Tensor(b!)? found_inf=None) -> "
        "Tensor");
    def("multi_tensor_scale_(Tensor(a!)[] tensors, Tensor scale, *, Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_scale_.Scalar(Tensor(a!)[] tensors, float scale, *, Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_zero_(Tensor(a!)[] tensors) -> ()");

    // Pairs of tensors. sum_squares: a partial of p = 2, added to.
    def("multi_tensor_copy_(Tensor(a!)[] destination, Tensor[] source, *, Tensor? scale=None, "
        "Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_accumulate_(Tensor(a!)[] destination, Tensor(b!)[] source, *, bool store=False, "
        "bool zero_source=False, Tensor? scale=None, Tensor(c!)? sum_squares=None, Tensor(d!)? found_inf=None, "
        "Tensor? noop=None) -> ()");

    // The same over a table in device memory, which may name other tensors at each replay.
    // table: [entries, 4] int64 (csrc/multi_tensor/table.h: Entry), chunks: [chunks, 2] int32 (Chunk), partial: zeros
    // before and after. The memory that the table's entries point to is read or written; it has no place in the schema.
    def("multi_tensor_norm_table(Tensor table, Tensor chunks, Tensor(a!) partial, float p=2.0, "
        "ScalarType dtype=float) -> Tensor");
    def("multi_tensor_clip_table_(Tensor(a!) table, Tensor chunks, Tensor total_norm, float max_norm, *, "
        "float eps=1e-06, Tensor(b!)? found_inf=None) -> ()");
    def("multi_tensor_scale_table_(Tensor(a!) table, Tensor chunks, Tensor scale, *, Tensor(b!)? found_inf=None) -> "
        "()");
    def("multi_tensor_zero_table_(Tensor(a!) table, Tensor chunks) -> ()");
    // store: None for each entry's own mode. Also the last node of a captured backward.
    def("multi_tensor_accumulate_table_(Tensor(a!) table, Tensor chunks, *, bool? store=None, bool zero_source=False, "
        "Tensor? scale=None, Tensor(b!)? sum_squares=None, Tensor(c!)? found_inf=None, Tensor? noop=None) -> ()");
}

PYBIND11_MODULE(_C, m) {
    m.def("build_config", [] {
        return std::map<std::string, std::string>{
            {"torch", TE_GRAPH_TORCH_VERSION}, {"cuda", TE_GRAPH_CUDA_VERSION}, {"archs", TE_GRAPH_ARCHS}};
    });
    te_graph::graph::bind(m);
    te_graph::multi_tensor::bind(m);
}
