// The columns of one table whose tensors are cast in one graph: updates come where eager execution has them, some
// before the graph, some in it, some behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/host_steps.h"
#include "fp8/scale_table.h"

namespace te_graph::fp8 {

class CapturedColumns final : public HostStep {
public:
    explicit CapturedColumns(std::shared_ptr<ScaleTable> table) : table_(std::move(table)) {}

    // Those of `steps`, made if there are none.
    static CapturedColumns& in(HostSteps& steps, Direction direction, const std::shared_ptr<ScaleTable>& table);
    // An outermost region of those that began inside the capture is left. is_inside: of one that began before it.
    static void note_region_exit(const HostSteps& steps, bool is_inside);

    // Around the launch of a cast, as in ScaleTable.
    void begin_cast(int64_t column);
    void end_cast(int64_t column) { due_.insert(column); }
    // The tensor of `column` may be cast before each replay.
    void note_cast_before(int64_t column) { due_before_.insert(column); }
    // Before a cast by the scale of `column` whose amax is not recorded.
    void note_read(int64_t column);
    // Before casts in another table, by a copy of that scale, of which those of weights come before each replay.
    void note_read_elsewhere(int64_t column);

    // An update that comes before the graph would have come behind a cast that reads a scale in it; or the region
    // around the graph decides otherwise where updates come in it.
    std::string change() const override;
    void prepare() override;
    void run() override;
    void finish() override;
    const void* identity() const override { return table_.get(); }
    // Columns of others in the same table are no matter.
    bool repeats(const HostStep& other) const override;

private:
    void update_if_left();
    void launch_update();

    struct Use {
        int64_t column;
        bool is_read;  // else a cast that is recorded, and has begun before each replay
    };
    enum class Left { kNone, kOutermost, kInside };

    const std::shared_ptr<ScaleTable> table_;
    std::vector<Use> uses_;               // until the first update in the graph
    std::set<int64_t> due_, due_before_;  // those since the last update, in the graph and before it
    std::set<int64_t> updated_;           // cast in the graph, and updated there
    Left left_ = Left::kNone;             // a region with casts, since the last update
    Left decided_ = Left::kNone;          // what an update in the graph, or its absence, went by
    bool has_updates_ = false;
    bool has_early_reads_ = false;  // before a cast in `uses_`
    ScaleTable::Casts before_;      // of a replay under way, those that it updates
};

}  // namespace te_graph::fp8
