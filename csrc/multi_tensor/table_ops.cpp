// Registration of the multi-tensor ops over tables in device memory.
#include <torch/library.h>

#include "common/note_writes.h"
#include "multi_tensor/arguments.h"
#include "multi_tensor/operands.h"

namespace te_graph::multi_tensor {
namespace {

constexpr int64_t kEntryWords = sizeof(TableEntry) / sizeof(int64_t);

TensorTable table_of(const char* op,
                     const at::Tensor& table,   // [entries, 4] int64
                     const at::Tensor& chunks)  // [chunks, 2] int32
{
    check_dtype(op, "table", table, at::kLong);
    check_dtype(op, "chunks", chunks, at::kInt);
    check_table(op, "table", table, kEntryWords);
    check_table(op, "chunks", chunks, 2);
    check_device(op, "chunks", chunks, table.device());
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(table.const_data_ptr()) % alignof(TableEntry) == 0, op,
                      ": expected table aligned to ", alignof(TableEntry), " bytes, got storage offset ",
                      table.storage_offset());
    // Without chunks the list is empty: there may be no memory to point to.
    static const Chunk none{};
    return {.entries = static_cast<const TableEntry*>(table.const_data_ptr()),
            .count = 0,
            .chunks = chunks.size(0) == 0 ? &none : static_cast<const Chunk*>(chunks.const_data_ptr()),
            .num_chunks = chunks.size(0)};
}

at::Tensor norm_table(const at::Tensor& table,    // [entries, 4] int64
                      const at::Tensor& chunks,   // [chunks, 2] int32
                      const at::Tensor& partial,  // [kPartialWords] int64
                      double p, at::ScalarType dtype) {
    constexpr const char* kOp = "multi_tensor_norm_table";
    check_p(kOp, p);
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, kOp, ": expected dtype float32 or float64, got ",
                     dtype);
    const TensorTable tensors = table_of(kOp, table, chunks);
    uint64_t* const words = partial_of(kOp, "partial", partial, table.device());
    const at::Tensor out = at::empty({}, partial.options().dtype(dtype));
    TE_GRAPH_RUN(table.device(), norm, tensors, p, words, result_in(out));
    note_write(partial);
    return out;
}

void clip_table(const at::Tensor& table,       // [entries, 4] int64
                const at::Tensor& chunks,      // [chunks, 2] int32
                const at::Tensor& total_norm,  // [] or [1]
                double max_norm, double eps,
                const std::optional<at::Tensor>& found_inf)  // [] or [1]
{
    constexpr const char* kOp = "multi_tensor_clip_table_";
    const Operands operands(kOp, {{"total_norm", total_norm, false}, {"found_inf", found_inf, true}});
    TE_GRAPH_RUN(table.device(), scale, table_of(kOp, table, chunks),
                 clip_of(kOp, total_norm, max_norm, eps, found_inf, table.device()));
    note_writes({found_inf});
}

void scale_table(const at::Tensor& table,                     // [entries, 4] int64
                 const at::Tensor& chunks,                    // [chunks, 2] int32
                 const at::Tensor& scale,                     // [] or [1]
                 const std::optional<at::Tensor>& found_inf)  // [] or [1]
{
    constexpr const char* kOp = "multi_tensor_scale_table_";
    const Operands operands(kOp, {{"scale", scale, false}, {"found_inf", found_inf, true}});
    TE_GRAPH_RUN(table.device(), scale, table_of(kOp, table, chunks),
                 {.scale = scalar_of(kOp, "scale", scale, table.device()),
                  .found_inf = flag_of(kOp, "found_inf", found_inf, table.device())});
    note_writes({found_inf});
}

void zero_table(const at::Tensor& table,   // [entries, 4] int64
                const at::Tensor& chunks)  // [chunks, 2] int32
{
    TE_GRAPH_RUN(table.device(), zero, table_of("multi_tensor_zero_table_", table, chunks));
}

void accumulate_table(const at::Tensor& table,   // [entries, 4] int64
                      const at::Tensor& chunks,  // [chunks, 2] int32
                      std::optional<bool> store, bool zero_source,
                      const std::optional<at::Tensor>& scale,        // [] or [1]
                      const std::optional<at::Tensor>& sum_squares,  // [kPartialWords]
                      const std::optional<at::Tensor>& found_inf,    // [] or [1]
                      const std::optional<at::Tensor>& noop)         // [] or [1]
{
    constexpr const char* kOp = "multi_tensor_accumulate_table_";
    const Operands operands(kOp, {{"scale", scale, false},
                                  {"sum_squares", sum_squares, true},
                                  {"found_inf", found_inf, true},
                                  {"noop", noop, false}});
    const TensorTable tensors = table_of(kOp, table, chunks);
    Accumulation accumulation = accumulation_of(kOp, scale, zero_source, sum_squares, found_inf, noop, table.device());
    accumulation.has_mode = store.has_value();
    accumulation.mode = store.value_or(false) ? Mode::kStore : Mode::kAdd;
    TE_GRAPH_RUN(table.device(), accumulate, tensors, accumulation);
    note_writes({sum_squares, found_inf});
}

void implement_table_ops(torch::Library& m) {
    m.impl("multi_tensor_norm_table", norm_table);
    m.impl("multi_tensor_clip_table_", clip_table);
    m.impl("multi_tensor_scale_table_", scale_table);
    m.impl("multi_tensor_zero_table_", zero_table);
    m.impl("multi_tensor_accumulate_table_", accumulate_table);
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CPU, m) { implement_table_ops(m); }
#ifdef TE_GRAPH_CUDA
TORCH_LIBRARY_IMPL(te_graph, CUDA, m) { implement_table_ops(m); }
#endif

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    using Tensor = const at::Tensor&;
    using Optional = const std::optional<at::Tensor>&;
    m.impl("multi_tensor_norm_table", [](Tensor table, Tensor chunks, Tensor partial, double, at::ScalarType dtype) {
        check_devices("multi_tensor_norm_table", table.device(), {{"chunks", chunks}, {"partial", partial}});
        return at::empty({}, partial.options().dtype(dtype));
    });
    m.impl("multi_tensor_clip_table_",
           [](Tensor table, Tensor chunks, Tensor total_norm, double, double, Optional found_inf) {
               check_devices("multi_tensor_clip_table_", table.device(),
                             {{"chunks", chunks}, {"total_norm", total_norm}, {"found_inf", found_inf}});
           });
    m.impl("multi_tensor_scale_table_", [](Tensor table, Tensor chunks, Tensor scale, Optional found_inf) {
        check_devices("multi_tensor_scale_table_", table.device(),
                      {{"chunks", chunks}, {"scale", scale}, {"found_inf", found_inf}});
    });
    m.impl("multi_tensor_zero_table_", [](Tensor table, Tensor chunks) {
        check_devices("multi_tensor_zero_table_", table.device(), {{"chunks", chunks}});
    });
    m.impl("multi_tensor_accumulate_table_", [](Tensor table, Tensor chunks, std::optional<bool>, bool, Optional scale,
                                                Optional sum_squares, Optional found_inf, Optional noop) {
        check_devices("multi_tensor_accumulate_table_", table.device(),
                      {{"chunks", chunks},
                       {"scale", scale},
                       {"sum_squares", sum_squares},
                       {"found_inf", found_inf},
                       {"noop", noop}});
    });
}

}  // namespace te_graph::multi_tensor
