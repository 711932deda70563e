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
constexpr const char* kTable = "fp8_cast_weights_table_";

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
    for (const at::TensorList list : {out, out_t}) {
        for (const at::Tensor& tensor : list) note_write(tensor);
    }
    note_writes({scale_inv, amax, counts});
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

// out, weights [M_i, N_i] each; out_t [N_i, M_i] each, or none; scale, scale_inv, amax [n]; counts [n, kCounts]; noop
// [] or [1].
void cast_weights_meta(at::TensorList out, at::TensorList out_t, at::TensorList weights, const at::Tensor& scale,
                       const at::Tensor& scale_inv, const at::Tensor& amax, const std::optional<at::Tensor>& counts,
                       const std::optional<at::Tensor>& noop) {
    check_not_empty(kList, weights);
    const at::Device device = weights[0].device();
    for (const at::Tensor& tensor : out) check_device(kList, "out", tensor, device);
    for (const at::Tensor& tensor : out_t) check_device(kList, "out_t", tensor, device);
    for (const at::Tensor& tensor : weights) check_device(kList, "weights", tensor, device);
    check_devices(kList, device,
                  {{"scale", scale}, {"scale_inv", scale_inv}, {"amax", amax}, {"counts", counts}, {"noop", noop}});
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
    m.impl(kTable, cast_weights_table);
}

TORCH_LIBRARY_IMPL(te_graph, Meta, m) {
    m.impl(kList, cast_weights_meta);
    m.impl(kTable, cast_weights_table_meta);
}

TORCH_LIBRARY_IMPL(te_graph, Autograd, m) {
    for (const char* name : {kList, kTable}) m.impl(name, no_derivative());
}

}  // namespace te_graph::fp8
