#include "fp8/captured_columns.h"

#include <algorithm>

#include "fp8/region.h"

namespace te_graph::fp8 {

CapturedColumns& CapturedColumns::in(HostSteps& steps, Direction direction, const std::shared_ptr<ScaleTable>& table) {
    if (steps.find(direction, table.get()) == nullptr) {
        steps.add(direction, std::make_shared<CapturedColumns>(table));
    }
    return *static_cast<CapturedColumns*>(steps.find(direction, table.get()));
}

void CapturedColumns::note_region_exit(const HostSteps& steps) {
    for (const auto& step : steps.of(Direction::kForward)) {
        auto* const columns = dynamic_cast<CapturedColumns*>(step.get());
        if (columns != nullptr) columns->region_was_left_ = !columns->cast_.empty();
    }
}

void CapturedColumns::begin_cast(int64_t column) {
    update_if_left();
    if (cast_.contains(column) || cast_before_.contains(column)) {
        launch_update();
    } else {
        begun_.insert(column);
    }
}

void CapturedColumns::update_if_left() {
    if (region_was_left_) launch_update();
}

void CapturedColumns::launch_update() {
    table_->launch_update();
    cast_.clear();
    cast_before_.clear();
    region_was_left_ = false;
}

void CapturedColumns::prepare() {
    for (const int64_t column : begun_) table_->begin_cast(column);
}

void CapturedColumns::run() {
    for (const int64_t column : cast_) table_->end_cast(column);
}

bool CapturedColumns::repeats(const HostStep& other) const {
    if (identity() != other.identity()) return false;
    const auto& columns = static_cast<const CapturedColumns&>(other).begun_;
    return std::any_of(begun_.begin(), begun_.end(), [&](int64_t column) { return columns.contains(column); });
}

void CapturedColumns::finish() {
    if (region_was_left_ && region() == 0) table_->update_if_due();  // where no outer one was entered since
}

}  // namespace te_graph::fp8
