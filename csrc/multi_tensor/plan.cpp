#include "multi_tensor/plan.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "common/to_device.h"
#include "multi_tensor/run.h"
#include "multi_tensor/tensor_list.h"

namespace te_graph::multi_tensor {
namespace {

constexpr const char* kPlan = "MultiTensorPlan";

// Exact duplicates are refused with the lists; here, too, views that begin elsewhere in one another.
void check_overlap(const std::vector<Entry>& entries, at::TensorList tensors) {
    std::vector<size_t> order(entries.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return entries[a].destination < entries[b].destination; });
    size_t last = entries.size();
    for (const size_t i : order) {
        if (entries[i].numel == 0) continue;
        TORCH_CHECK_VALUE(
            last == entries.size() || static_cast<const char*>(entries[last].destination) + tensors[last].nbytes() <=
                                          static_cast<const char*>(entries[i].destination),
            kPlan, ": tensors ", last, " and ", i, " overlap");
        last = i;
    }
}

}  // namespace

std::vector<Entry> Plan::entries_of(const Tensors& tensors, const Tensors& sources) {
    TORCH_CHECK_VALUE(!tensors.empty(), kPlan, ": expected at least one tensor, got an empty list");
    const auto check_direct = [](const TensorEntries& entries) {
        TORCH_CHECK_VALUE(entries.is_direct(), kPlan,
                          ": expected tensors without gaps in memory, and sources laid out like their destinations");
    };
    if (sources.empty()) {
        TensorEntries entries(kPlan, tensors, true);
        check_direct(entries);
        check_overlap(entries.entries(), tensors);
        return entries.entries();
    }
    TensorEntries entries(kPlan, tensors, sources, true);
    check_direct(entries);
    check_overlap(entries.entries(), tensors);
    return entries.entries();
}

std::vector<Plan::Place> Plan::places_of(const Tensors& tensors) {
    std::vector<Place> places;
    places.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) {
        const auto storage = tensor.storage().getWeakStorageImpl();
        const c10::StorageImpl* const memory = tensor.storage().unsafeGetStorageImpl();
        places.push_back({decltype(Place::tensor)(tensor.getIntrusivePtr()), storage, memory, memory->data(),
                          tensor.storage_offset(), tensor.numel()});
    }
    return places;
}

Plan::Plan(const Tensors& tensors, const Tensors& sources)
    : entries_(entries_of(tensors, sources)), tensors_(places_of(tensors)), sources_(places_of(sources)) {
    const at::Device device = tensors[0].device();
    std::vector<int64_t> numels;
    for (const Entry& entry : entries_) {
        numels.push_back(entry.numel);
        if (entry.destination_dtype == DType::kFloat64) norm_dtype_ = at::kDouble;
        may_accumulate_ &= is_supported(entry.source_dtype, entry.destination_dtype);
    }
    std::vector<Chunk> chunks = make_chunks(numels);
    table_ = to_device(entries_, sizeof(Entry) / sizeof(int64_t), at::kLong, device);
    chunks_ = to_device(chunks, 2, at::kInt, device);
    state_ = at::zeros({kStateWords}, at::TensorOptions().dtype(at::kLong).device(device));
}

bool Plan::Place::is_in_place() const {
    const c10::TensorImpl* const now = tensor._unsafe_get_target();
    return now->unsafe_storage().unsafeGetStorageImpl() == memory && memory->data() == data &&
           now->storage_offset() == offset && now->numel() == numel && now->is_non_overlapping_and_dense();
}

void Plan::check(const std::vector<Place>& places, const char* list, bool is_written) {
    for (size_t i = 0; i < places.size(); ++i) {
        const Place& place = places[i];
        TORCH_CHECK(place.is_alive(), kPlan, ": ", list, "[", i,
                    "] no longer exists; call update() with the tensors that took its place");
        TORCH_CHECK(place.is_in_place(), kPlan, ": ", list, "[", i,
                    "] moved to other memory or changed its size; call update() with the tensors as they are now");
    }
    if (!is_written) return;
    // Apart from the looks above, which would wait for each of these. The counter lives as long as the object's memory.
    for (const Place& place : places) place.tensor._unsafe_get_target()->bump_version();
}

void Plan::check(bool writes_tensors, bool writes_sources) const {
    check(tensors_, "tensors", writes_tensors);
    check(sources_, "sources", writes_sources);
}

Plan::Tensors Plan::tensors(bool with_tensors, bool with_sources) const {
    Tensors alive;
    const auto add = [&](const std::vector<Place>& places) {
        for (const Place& place : places) {
            const auto tensor = place.tensor.lock();
            if (tensor.defined()) alive.emplace_back(tensor);
        }
    };
    if (with_tensors) add(tensors_);
    if (with_sources) add(sources_);
    return alive;
}

void Plan::update(const Tensors& tensors, const Tensors& sources) {
    TORCH_CHECK_VALUE(tensors.size() == tensors_.size() && sources.size() == sources_.size(), kPlan,
                      ": expected as many tensors as before, ", tensors_.size(), " and ", sources_.size(),
                      " sources, got ", tensors.size(), " and ", sources.size(), "; make a new plan");
    const std::vector<Entry> entries = entries_of(tensors, sources);
    TORCH_CHECK_VALUE(tensors[0].device() == table_.device(), kPlan, ": expected tensors on ", table_.device(),
                      ", got ", tensors[0].device());
    std::vector<EntryUpdate> updates;
    for (size_t i = 0; i < entries.size(); ++i) {
        const Entry &now = entries[i], &before = entries_[i];
        TORCH_CHECK_VALUE(now.numel == before.numel && now.source_dtype == before.source_dtype &&
                              now.destination_dtype == before.destination_dtype,
                          kPlan, ": expected tensors[", i, "] of ", before.numel,
                          " elements and the dtypes of before, got ", now.numel, " elements of ",
                          tensors[i].scalar_type(), "; make a new plan");
        if (now.destination == before.destination && now.source == before.source) continue;
        updates.push_back({now.source, now.destination, static_cast<int32_t>(i), now.mode, true});
    }
    auto* const table = static_cast<Entry*>(table_.mutable_data_ptr());
    const auto count = static_cast<int64_t>(updates.size());
    run_on(
        table_.device(), [&] { update_entries_cpu(table, updates.data(), count); },
        TE_GRAPH_LAUNCH(launch_update_entries(table, updates.data(), count, stream)));
    entries_ = entries;
    tensors_ = places_of(tensors);
    sources_ = places_of(sources);
}

}  // namespace te_graph::multi_tensor
