// One tensor's column of a table of scales, and what surrounds its casts.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "common/host_steps.h"
#include "fp8/captured_columns.h"
#include "fp8/scale_table.h"

namespace te_graph::fp8 {

// No table: current scaling.
struct ScaleColumn {
    ScaleColumn(std::shared_ptr<ScaleTable> owner, int64_t column);

    // Around the launch of a cast whose amax is recorded; where it is captured, in that direction of `steps`.
    void begin_cast(HostSteps* steps, Direction direction) const;
    void end_cast(HostSteps* steps, Direction direction) const;

    std::shared_ptr<ScaleTable> table;
    int64_t column;
    std::optional<at::Tensor> scale, amax;  // [1] each, views of the table's
};

}  // namespace te_graph::fp8
