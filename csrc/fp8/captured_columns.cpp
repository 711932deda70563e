#include "fp8/captured_columns.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "fp8/region.h"

namespace te_graph::fp8 {

CapturedColumns& CapturedColumns::in(HostSteps& steps, Direction direction, const std::shared_ptr<ScaleTable>& table) {
    if (steps.find(direction, table.get()) == nullptr) {
        steps.add(direction, std::make_shared<CapturedColumns>(table));
    }
    return *static_cast<CapturedColumns*>(steps.find(direction, table.get()));
}

void CapturedColumns::note_region_exit(const HostSteps& steps, bool is_inside) {
    for (const auto& step : steps.of(Direction::kForward)) {
        auto* const columns = dynamic_cast<CapturedColumns*>(step.get());
        if (columns == nullptr || columns->due_.empty()) continue;
        columns->left_ = is_inside ? Left::kInside : Left::kOutermost;
    }
}

void CapturedColumns::begin_cast(int64_t column) {
    update_if_left();
    if (due_.contains(column) || due_before_.contains(column)) {
        launch_update();
    } else if (!has_updates_) {
        has_early_reads_ |= std::any_of(uses_.begin(), uses_.end(), [](const Use& use) { return use.is_read; });
        uses_.push_back({column, false});
    }
}

void CapturedColumns::note_read(int64_t column) {
    update_if_left();
    if (!has_updates_) uses_.push_back({column, true});
}

void CapturedColumns::note_read_elsewhere(int64_t column) {
    TORCH_CHECK(left_ == Left::kNone && !has_updates_,
                "te_graph.Linear: expected a layer that trains in a capture to be evaluated there by the same recipe, "
                "got another one, whose cast of the weight would go by the scale of before: evaluate it by that recipe "
                "outside of the capture, or by the same one");
    note_read(column);
}

void CapturedColumns::update_if_left() {
    if (left_ == Left::kNone) return;
    decided_ = left_;
    left_ = Left::kNone;
    if (decided_ == Left::kOutermost) launch_update();
}

void CapturedColumns::launch_update() {
    table_->launch_update();
    updated_.merge(due_);
    due_.clear();
    due_before_.clear();
    left_ = Left::kNone;
    has_updates_ = true;
}

std::string CapturedColumns::change() const {
    if (decided_ == Left::kInside && region() == 0) return "te_graph.fp8_autocast was left";
    if (decided_ == Left::kOutermost && region() != 0) return "te_graph.fp8_autocast was entered";
    if (!has_early_reads_) return {};
    const auto due = std::find_if(uses_.begin(), uses_.end(),
                                  [this](const Use& use) { return !use.is_read && table_->is_due(use.column); });
    if (due == uses_.end()) return {};  // nothing is updated before the graph
    const bool is_read_before =
        std::any_of(uses_.begin(), due, [this](const Use& use) { return use.is_read && table_->is_due(use.column); });
    return is_read_before ? "an FP8 layer that is evaluated inside, before others train there, was trained" : "";
}

void CapturedColumns::prepare() {
    for (const Use& use : uses_) {
        if (!use.is_read) table_->begin_cast(use.column);
    }
}

void CapturedColumns::run() {
    if (has_updates_) before_ = table_->casts();
}

bool CapturedColumns::repeats(const HostStep& other) const {
    if (identity() != other.identity()) return false;
    const auto& uses = static_cast<const CapturedColumns&>(other).uses_;
    return std::any_of(uses_.begin(), uses_.end(), [&](const Use& use) {
        return !use.is_read &&
               std::any_of(uses.begin(), uses.end(), [&](const Use& one) { return one.column == use.column; });
    });
}

void CapturedColumns::finish() {
    // Not before the launch: another thread's update in between would take what the graph will record for done.
    table_->note_captured(before_, updated_, due_);
    if (left_ != Left::kNone && region() == 0) table_->update_if_due();  // where no outer one was entered since
}

}  // namespace te_graph::fp8
