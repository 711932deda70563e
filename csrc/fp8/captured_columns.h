// The columns of one table whose tensors are cast in one graph: updates come where eager execution has them, some
// before the graph, some in it, some behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <set>

#include "common/host_steps.h"
#include "fp8/scale_table.h"

namespace te_graph::fp8 {

class CapturedColumns final : public HostStep {
public:
    explicit CapturedColumns(std::shared_ptr<ScaleTable> table) : table_(std::move(table)) {}

    // Those of `steps`, made if there are none.
    static CapturedColumns& in(HostSteps& steps, Direction direction, const std::shared_ptr<ScaleTable>& table);
    // An outermost region is left inside the capture.
    static void note_region_exit(const HostSteps& steps);

    // Around the launch of a cast, as in ScaleTable.
    void begin_cast(int64_t column);
    void end_cast(int64_t column) { cast_.insert(column); }
    // The tensor of `column` may be cast before each replay.
    void note_cast_before(int64_t column) { cast_before_.insert(column); }
    // Before a cast that is not recorded.
    void update_if_left();

    void prepare() override;
    void run() override;
    void finish() override;
    const void* identity() const override { return table_.get(); }
    // Columns of others in the same table are no matter.
    bool repeats(const HostStep& other) const override;

private:
    void launch_update();

    const std::shared_ptr<ScaleTable> table_;
    std::set<int64_t> begun_;               // casts, which begin before each replay
    std::set<int64_t> cast_, cast_before_;  // since the last update
    bool region_was_left_ = false;          // an outermost one with casts, since the last update
};

}  // namespace te_graph::fp8
