#include "fp8/scale_column.h"

#include <ATen/ops/narrow.h>
#include <ATen/ops/select.h>

namespace te_graph::fp8 {

ScaleColumn::ScaleColumn(std::shared_ptr<ScaleTable> owner, int64_t column) : table(std::move(owner)), column(column) {
    if (table == nullptr) return;
    scale = table->scale().narrow(0, column, 1);
    amax = table->history().select(0, 0).narrow(0, column, 1);
}

void ScaleColumn::begin_cast(HostSteps* steps, Direction direction) const {
    if (table == nullptr) return;
    if (steps == nullptr) {
        table->begin_cast(column);
    } else {
        CapturedColumns::in(*steps, direction, table).begin_cast(column);
    }
}

void ScaleColumn::end_cast(HostSteps* steps, Direction direction) const {
    if (table == nullptr) return;
    if (steps == nullptr) {
        table->end_cast(column);
    } else {
        CapturedColumns::in(*steps, direction, table).end_cast(column);
    }
}

}  // namespace te_graph::fp8
