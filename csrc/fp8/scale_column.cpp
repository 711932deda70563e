#include "fp8/scale_column.h"

#include <ATen/ops/narrow.h>
#include <ATen/ops/select.h>

namespace te_graph::fp8 {

ScaleColumn::ScaleColumn(std::shared_ptr<ScaleTable> owner, int64_t column) : table(std::move(owner)), number(column) {
    if (table == nullptr) return;
    scale = table->scale().narrow(0, number, 1);
    amax = table->history().select(0, 0).narrow(0, number, 1);
}

void ScaleColumn::begin_cast(HostSteps* steps, Direction direction) const {
    if (table == nullptr) return;
    if (steps == nullptr) {
        table->settle(number);
    } else {
        CapturedColumns::in(*steps, direction, table).begin_cast(number);
    }
}

void ScaleColumn::end_cast(HostSteps* steps, Direction direction) const {
    if (table == nullptr) return;
    if (steps == nullptr) {
        table->note(number);
    } else {
        CapturedColumns::in(*steps, direction, table).end_cast(number);
    }
}

}  // namespace te_graph::fp8
