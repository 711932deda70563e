// Everything that te_graph registers, on one page: the schemas of all ops and the extension module.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "graph/bindings.h"

// Mutated arguments are marked (a!); ops that mutate return ().
TORCH_LIBRARY(te_graph, m) {
    // Adds or stores gradients as a table of tensors says: the last node of a captured backward.
    // table: [entries, 4] int64 (csrc/multi_tensor/accumulate.h: Entry), chunks: [chunks, 2] int32 (Chunk).
    // The memory that the table's entries point to is written; it has no place in the schema.
    m.def("multi_tensor_accumulate_table_(Tensor(a!) table, Tensor chunks) -> ()", {at::Tag::pt2_compliant_tag});
}

PYBIND11_MODULE(_C, m) {
    m.def("build_config", [] {
        return std::map<std::string, std::string>{
            {"torch", TE_GRAPH_TORCH_VERSION}, {"cuda", TE_GRAPH_CUDA_VERSION}, {"archs", TE_GRAPH_ARCHS}};
    });
    te_graph::graph::bind(m);
}
