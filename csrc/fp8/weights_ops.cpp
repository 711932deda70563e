// Registration of the casts of many weights.
#include <torch/library.h>

#include "common/no_derivative.h"
#include "common/note_writes.h"
#include "common/run_on.h"
#include "fp8/arguments.h"
#include "fp8/cast_list.h"

namespace te_graph::fp8 {
namespace {

constexpr const char* kList = "fp8_cast_weights_";
constexpr const char* kVectors = "fp8_cast_weights_.List";
constexpr const char* kTable = "fp8_cast_weights_table_";

// lists: [...] each.
void note_list_writes(std::initializer_list<at::TensorList> lists) {
    for (const at::TensorList list : lists) {
        for (const at::Tensor& tensor : list) note_write(tensor);
    }
}

void cast_weights(at::TensorList out,                       // [M_i, N_i] each
                  at::TensorList out_t,                     // [N_i, M_i] each, or none
                  at::TensorList weights,                   // [M_i, N_i] each
                  const at::Tensor& scale,                  // [n]
                  const at::Tensor& scale_inv,              // [n]
                  const at::Tensor& amax,                   // [n]
                  const std::optional<at::Tensor>& counts,  // [n, kCounts]
                  const std::optional<at::Tensor>& noop)    // [] or [1]
{
    const std::vector<Cast> casts = casts_of(kList, out, out_t, weights, scale, scale_inv, amax,
                                             counts.value_or(at::Tensor()), noop.value_or(at::Tensor()));
    const at::Device device = weights[0].device();
    const Flag flag = flag_of(kList, "noop", noop, device);
    TE_GRAPH_RUN(device, cast_weights, casts, flag);
    note_list_writes({out, out_t});
    note_writes({scale_inv, amax, counts});
}

void cast_weights_by_vectors(at::TensorList out,        // [M_i, N_i] each
                             at::TensorList out_t,      // [N_i, M_i] each, or none
                             at::TensorList weights,    // [M_i, N_i] each
                             at::TensorList scale,      // [n_j] each, n together
                             at::TensorList scale_inv,  // [n_j] each, n together
                             at::TensorList amax)       // [n_j] each, n together, or none
{
    const std::vector<Cast> casts = casts_of(kList, out, out_t, weights, scale, scale_inv, amax, {}, {});
    TE_GRAPH_RUN(weights[0].device(), cast_weights, casts, {});
    note_list_writes({out, out_t, scale_inv, amax});
}

void cast_weights_table(const at::Tensor& table,  // [n, 10] int64
                        const at::Tensor& tiles,  // [tiles, 2] int32
                        const at::Tensor& state,  // [2] int32
                        at::TensorList written,   // [...] each
                        int64_t kind,
                        const std::optional<at::Tensor>& noop)  // [] or [1]
{
    check_dtype(kTable, "table", table, at::kLong);
    check_dtype(kTable, "tiles", tiles, at::kInt);
    check_dtype(kTable, "state", state, at::kInt);
    check_table(kTable, "table", table, sizeof(Cast) / sizeof(int64_t));
    check_table(kTable, "tiles", tiles, 2);
    check_buffer(kTable, "state", state, {2}, table.device());
    check_device(kTable, "tiles", tiles, table.device());
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(table.const_data_ptr()) % alignof(Cast) == 0, kTable,
                      ": expected table aligned to ", alignof(Cast), " bytes, got storage offset ",
                      table.storage_offset());
    if (tiles.size(0) == 0) return;
    const CastTable casts{.casts = static_cast<const Cast*>(table.const_data_ptr()),
                          .count = table.size(0),
                          .tiles = static_cast<const Tile*>(tiles.const_data_ptr()),
                          .num_tiles = tiles.size(0),
                          .state = static_cast<uint32_t*>(state.data_ptr()),
                          .kind = static_cast<int>(kind)};
    const Flag flag = flag_of(kTable, "noop", noop, table.device());
    TE_GRAPH_RUN(table.device(), cast_weights_table, casts, flag);
    note_write(state);
    for (const at::Tensor& tensor : written) note_write(tensor);
}

// out, weights [M_i, N_i] each; out_t [N_i, M_i] each, or none; scale, scale_inv, amax [n_j] each.
void cast_weights_by_vectors_meta(at::TensorList out, at::TensorList out_t, at::TensorList weights,
                                  at::TensorList scale, at::TensorList scale_inv, at::TensorList amax) {
    check_not_empty(kList, weights);
    const auto check_list = [&](const char* name, at::TensorList list) {
        for (const at::Tensor& tensor : list) check_device(kList, name, tensor, weights[0].device());
    };
    check_list("out", out);
    check_list("out_t", out_t);
    check_list("weights", weights);
    check_list("scale", scale);
    check_list("scale_inv", scale_inv);
    check_list("amax", amax);
}
// out, weights [M_i, N_i] each; out_t [N_i, M_i] each, or none; scale, scale_inv, amax [n]; counts [n, kCounts]; noop
// [] or [1].
void cast_weights_meta(at::TensorList out, at::TensorList out_t, at::TensorList weights, const at::Tensor& scale,
                       const at::Tensor& scale_inv, const at::Tensor& amax, const std::optional<at::Tensor>& counts,
                       const std::optional<at::Tensor>& noop) {
    cast_weights_by_vectors_meta(out, out_t, weights, scale, scale_inv, amax);
    check_devices(kList, weights[0].device(), {{"counts", counts}, {"noop", noop}});
}
// table [n, 10]; tiles [tiles, 2]; state [2]; written [...] each; noop [] or [1].
void cast_weights_table_meta(const at::Tensor& table, const at::Tensor& tiles, const at::Tensor& state,
                             at::TensorList written, int64_t, const std::optional<at::Tensor>& noop) {
    for (const at::Tensor& tensor : written) check_device(kTable, "written", tensor, table.device());
    check_devices(kTable, table.device(), {{"tiles", tiles}, {"state", state}, {"noop", noop}});
}

}  // namespace

TORCH_LIBRARY_IMPL(te_graph, CompositeExplicitAutograd, m) {
    m.impl(kList, cast_weights);
    m.impl(kVectors, cast_weights_by_vectors);
    m.impl(kTable, cast_weights_table);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kList, cast_weights_meta);
    m.impl(kVectors, cast_weights_by_vectors_meta);
    m.impl(kTable, cast_weights_table_meta);
}

TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kList, kVectors, kTable}) m.impl(name, no_derivative());
}

}  // namespace te_graph::fp8
