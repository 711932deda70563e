// The scales of delayed scaling for many tensors, each a column, and when they are updated.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/stream_order.h"

namespace te_graph::fp8 {

// A column is rolled once between two casts of its tensor: when all that run in a region are through, or sooner, where
// a tensor is cast again. Columns that no cast has touched stay as they are, so that it does not matter which columns
// one launch updates together.
class ScaleTable {
public:
    // history: [H, n], scale, scale_inv: [n], all fp32; zeros and ones. Addresses stay.
    ScaleTable(at::Tensor history, at::Tensor scale, at::Tensor scale_inv, double fp8_max, double margin,
               std::string amax_compute_algo);

    // Before each update, with the row that holds the newest amaxes, [n]: makes them those of all ranks.
    using Reduce = std::function<void(const at::Tensor&)>;
    void set_reduce(Reduce reduce) { reduce_ = std::move(reduce); }

    // Before the tensor of `column` is cast: updates, if it was cast since the last update.
    void begin_cast(int64_t column);
    // The tensor of `column` has been cast. Not before the launch: an update that another thread launches in between
    // would forget it.
    void end_cast(int64_t column);
    // Updates, if a tensor was cast since the last time.
    void update_if_due();
    // Of each column, how many casts there were so far.
    using Casts = std::vector<int64_t>;
    Casts casts();
    // A graph has been launched that casts the tensors of `columns`, after its updates, if any: of the casts `updated`,
    // and of others inside, of the columns `updated_inside`.
    void note_captured(const Casts& updated, const std::set<int64_t>& updated_inside, const std::set<int64_t>& columns);
    // How many casts of the tensor of `column` were followed by an update: another number when its scale is another.
    int64_t updated_casts(int64_t column);
    // The launch of an update of all columns, by itself: which of them are due is left as it is. Captures call it;
    // eager code goes through begin_cast() and update_if_due().
    void launch_update();
    // Between these no other thread launches an update: around what writes histories and scales otherwise.
    void hold_updates();
    void release_updates() { updates_.unlock(); }
    // Whether the tensor of `column` was cast since the last update.
    bool is_due(int64_t column);
    // Let that be so, or not, where a cast is undone.
    void set_due(int64_t column, bool is_due);

    // [H, n].
    const at::Tensor& history() const { return history_; }
    // [n].
    const at::Tensor& scale() const { return scale_; }

private:
    // What comes on the current stream does so after what other streams did with the table. With the mutex.
    void order();
    // Updates, if the tensor of `column`, or of any without one, was cast since the last time. What was is due until
    // the launch: another thread, whose tensor is due as well, is not to cast it before. An update too many rolls
    // nothing.
    void update_if_due(std::optional<int64_t> column);
    // With the mutex.
    bool has_due(std::optional<int64_t> column) const;
    // These casts have been followed by an update. With the mutex.
    void note_updated(const Casts& casts);

    const at::Tensor history_, scale_, scale_inv_;  // [H, n], [n], [n]
    const double fp8_max_, margin_;
    const std::string algorithm_;
    Reduce reduce_;
    std::recursive_mutex updates_;  // held over the launch: two updates must not interleave
    // Of what follows: forwards and backwards run on threads of their own. Not held where Python may be called.
    std::mutex mutex_;
    Casts casts_, updated_casts_;  // all so far and those before the last update
#ifdef TE_GRAPH_CUDA
    StreamOrder order_;
#endif
};

}  // namespace te_graph::fp8
