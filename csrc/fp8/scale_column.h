// One tensor's column of a table of scales, and what its casts begin with.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "common/host_steps.h"
#include "fp8/scale_table.h"

namespace te_graph::fp8 {

// No table: current scaling.
struct ScaleColumn {
    ScaleColumn(std::shared_ptr<ScaleTable> table, int64_t number);

    // Around the launch of a cast whose amax is recorded. Where it is captured, in the forward of `steps` or in its
    // backward, the table is told before each replay; what comes once more in one graph is updated there in between.
    void begin_cast(HostSteps* steps, bool is_forward) const;
    void end_cast(const HostSteps* steps) const;

    std::shared_ptr<ScaleTable> table;
    int64_t number;
    std::optional<at::Tensor> scale, amax;  // [1] each, views of the table's
};

}  // namespace te_graph::fp8
