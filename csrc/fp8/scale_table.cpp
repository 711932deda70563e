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
      has_run_(static_cast<size_t>(scale_.size(0))) {}

bool ScaleTable::take_due(std::optional<int64_t> column) {
    const std::lock_guard lock(mutex_);
    order();
    const bool is_due = column ? has_run_[static_cast<size_t>(*column)] : has_any_run_;
    if (is_due) {
        has_run_.assign(has_run_.size(), false);
        has_any_run_ = false;
    }
    return is_due;
}

void ScaleTable::settle(int64_t column) {
    if (take_due(column)) launch_update();
}

void ScaleTable::note(int64_t column) {
    const std::lock_guard lock(mutex_);
    has_run_[static_cast<size_t>(column)] = has_any_run_ = true;
}

void ScaleTable::update() {
    if (take_due(std::nullopt)) launch_update();
}

bool ScaleTable::has_run(int64_t column) {
    const std::lock_guard lock(mutex_);
    return has_run_[static_cast<size_t>(column)];
}

void ScaleTable::set_has_run(int64_t column, bool has_run) {
    const std::lock_guard lock(mutex_);
    has_run_[static_cast<size_t>(column)] = has_run;
    has_any_run_ = std::find(has_run_.begin(), has_run_.end(), true) != has_run_.end();
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
