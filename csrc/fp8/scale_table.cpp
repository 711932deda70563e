#include "fp8/scale_table.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>

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
      casts_(static_cast<size_t>(scale_.size(0))),
      updated_casts_(casts_.size()) {}

bool ScaleTable::has_due(std::optional<int64_t> column) const {
    if (!column) return casts_ != updated_casts_;
    const auto place = static_cast<size_t>(*column);
    return casts_[place] != updated_casts_[place];
}

void ScaleTable::update_if_due(std::optional<int64_t> column) {
    Casts casts;
    {
        const std::lock_guard lock(mutex_);
        order();
        if (!has_due(column)) return;
        casts = casts_;
    }
    launch_update();
    const std::lock_guard lock(mutex_);
    note_updated(casts);
}

void ScaleTable::note_updated(const Casts& casts) {
    for (size_t i = 0; i < casts.size(); ++i) updated_casts_[i] = std::max(updated_casts_[i], casts[i]);
}

void ScaleTable::begin_cast(int64_t column) { update_if_due(column); }

void ScaleTable::update_if_due() { update_if_due(std::nullopt); }

void ScaleTable::end_cast(int64_t column) {
    const std::lock_guard lock(mutex_);
    ++casts_[static_cast<size_t>(column)];
}

ScaleTable::Casts ScaleTable::casts() {
    const std::lock_guard lock(mutex_);
    return casts_;
}

void ScaleTable::note_captured(const Casts& updated, const std::set<int64_t>& updated_inside,
                               const std::set<int64_t>& columns) {
    const std::lock_guard lock(mutex_);
    note_updated(updated);
    for (const int64_t column : updated_inside) {
        ++casts_[static_cast<size_t>(column)];
        ++updated_casts_[static_cast<size_t>(column)];
    }
    for (const int64_t column : columns) ++casts_[static_cast<size_t>(column)];
}

int64_t ScaleTable::updated_casts(int64_t column) {
    const std::lock_guard lock(mutex_);
    return updated_casts_[static_cast<size_t>(column)];
}

bool ScaleTable::is_due(int64_t column) {
    const std::lock_guard lock(mutex_);
    return has_due(column);
}

void ScaleTable::set_due(int64_t column, bool is_due) {
    const std::lock_guard lock(mutex_);
    if (has_due(column) == is_due) return;
    const auto place = static_cast<size_t>(column);
    if (is_due) {
        ++casts_[place];
    } else {
        updated_casts_[place] = casts_[place];
    }
}

void ScaleTable::order() {
#ifdef TE_GRAPH_CUDA
    if (scale_.is_cuda()) order_.run(c10::cuda::getCurrentCUDAStream(scale_.device().index()), [] {});
#endif
}

void ScaleTable::hold_updates() {
    // Who holds them may run Python.
    std::optional<pybind11::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    updates_.lock();
}

void ScaleTable::launch_update() {
    static const auto op =
        own_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, double, double,
                    const std::string&, bool)>("te_graph::amax_and_scale_update_inplace", "Scalar");
    const at::NoGradGuard no_grad;
    if (reduce_) reduce_(history_[0]);
    // All columns; made anew, since captures watch what ops use that was there before.
    const at::Tensor no_mask = at::empty({0}, scale_.options().dtype(at::kBool));
    hold_updates();
    const std::lock_guard lock(updates_, std::adopt_lock);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // nothing is recorded, and its kernel is a boxed one
    op.call(history_, scale_, scale_inv_, no_mask, true, fp8_max_, margin_, algorithm_, false);
}

}  // namespace te_graph::fp8
