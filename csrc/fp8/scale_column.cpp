#include "fp8/scale_column.h"

#include <ATen/ops/narrow.h>
#include <ATen/ops/select.h>

namespace te_graph::fp8 {
namespace {

// Before a replay that casts the tensor of a column.
class ColumnStep final : public HostStep {
public:
    explicit ColumnStep(const ScaleColumn& column) : column_(column) {}
    void prepare() override { column_.table->settle(column_.number); }
    void run() override { column_.table->note(column_.number); }
    const void* identity() const override {
        return static_cast<const float*>(column_.table->scale().const_data_ptr()) + column_.number;
    }

private:
    const ScaleColumn column_;
};

}  // namespace

ScaleColumn::ScaleColumn(std::shared_ptr<ScaleTable> owner, int64_t column) : table(std::move(owner)), number(column) {
    if (table == nullptr) return;
    scale = table->scale().narrow(0, number, 1);
    amax = table->history().select(0, 0).narrow(0, number, 1);
}

void ScaleColumn::begin_cast(HostSteps* steps, bool is_forward) const {
    if (table == nullptr) return;
    if (steps == nullptr) {
        table->settle(number);
        return;
    }
    auto step = std::make_shared<ColumnStep>(*this);
    const bool is_first = is_forward ? steps->add_forward(std::move(step)) : steps->add_backward(std::move(step));
    if (!is_first) table->launch_update();
}

void ScaleColumn::end_cast(const HostSteps* steps) const {
    if (table != nullptr && steps == nullptr) table->note(number);
}

}  // namespace te_graph::fp8
