#include "fp8/scale_table.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "common/own_op.h"

namespace te_graph::fp8 {

ScaleTable::ScaleTable(at::Tensor history, at::Tensor scale, at::Tensor scale_inv, double fp8_max, double margin,
                       std::string amax_compute_algo)
    : history_(std::move(history)),
      scale_(std::move(scale)),
      scale_inv_(std::move(scale_inv)),
      fp8_max_(fp8_max),
      margin_(margin),
      algorithm_(std::move(amax_compute_algo)),
      due_(static_cast<size_t>(scale_.size(0))) {}

bool ScaleTable::take_due(std::optional<int64_t> column) {
    const std::lock_guard lock(mutex_);
    order();
    const bool is_due = column ? due_[static_cast<size_t>(*column)] : any_due_;
    if (is_due) {
        due_.assign(due_.size(), false);
        any_due_ = false;
    }
    return is_due;
}

void ScaleTable::begin_cast(int64_t column) {
    if (take_due(column)) launch_update();
}

void ScaleTable::end_cast(int64_t column) {
    const std::lock_guard lock(mutex_);
    due_[static_cast<size_t>(column)] = any_due_ = true;
}

void ScaleTable::update_if_due() {
    if (take_due(std::nullopt)) launch_update();
}

void ScaleTable::note_captured(bool has_updates, const std::set<int64_t>& columns) {
    const std::lock_guard lock(mutex_);
    if (has_updates) {
        due_.assign(due_.size(), false);
        any_due_ = false;
    }
    for (const int64_t column : columns) due_[static_cast<size_t>(column)] = any_due_ = true;
}

bool ScaleTable::is_due(int64_t column) {
    const std::lock_guard lock(mutex_);
    return due_[static_cast<size_t>(column)];
}

void ScaleTable::set_due(int64_t column, bool is_due) {
    const std::lock_guard lock(mutex_);
    due_[static_cast<size_t>(column)] = is_due;
    any_due_ = std::find(due_.begin(), due_.end(), true) != due_.end();
}

void ScaleTable::order() {
#ifdef TE_GRAPH_CUDA
    if (scale_.is_cuda()) order_.run(c10::cuda::getCurrentCUDAStream(scale_.device().index()), [] {});
#endif
}

void ScaleTable::launch_update() {
    static const auto op =
        own_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, double, double,
                    const std::string&, bool)>("te_graph::amax_and_scale_update_inplace", "Scalar");
    const at::NoGradGuard no_grad;
    if (reduce_) reduce_(history_[0]);
    const at::Tensor no_mask = at::empty({0}, scale_.options().dtype(at::kBool));
    const std::lock_guard lock(updates_);
    op.call(history_, scale_, scale_inv_, no_mask, true, fp8_max_, margin_, algorithm_, false);
}

}  // namespace te_graph::fp8
