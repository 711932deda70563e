#include "graphs/callables/lent_storages.h"

#include <Python.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>

#ifdef TE_GRAPH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace te_graph::graphs {
namespace {

void drop_owner(void* owner) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(owner)); }

// A StorageImpl over `memory`'s bytes that keeps `memory` alive.
c10::intrusive_ptr<c10::StorageImpl> storage_over(const c10::Storage& memory) {
    c10::StorageImpl* const owner = memory.unsafeGetStorageImpl();
    c10::raw::intrusive_ptr::incref(owner);
    at::DataPtr pointer(owner->mutable_data(), owner, &drop_owner, owner->device());
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), owner->nbytes(),
                                                 std::move(pointer), c10::GetAllocator(owner->device_type()),
                                                 /*resizable=*/true);
}

// Something that only this thread has; null on one that runs a backward.
const void* this_thread() {
    static thread_local const char mark = 0;
    return torch::autograd::get_current_graph_task_id() == -1 ? &mark : nullptr;
}

// Of the process: an address may be asked for on any thread while a replay protects what it overwrites.
std::mutex moves;

void move_to_own_memory(c10::StorageImpl& storage) {
    const size_t bytes = storage.nbytes();
    at::DataPtr copy = c10::GetAllocator(storage.device_type())->allocate(bytes);
    if (storage.device_type() == at::kCPU) {
        std::memcpy(copy.get(), storage.data(), bytes);
    } else {
#ifdef TE_GRAPH_CUDA
        C10_CUDA_CHECK(cudaMemcpyAsync(copy.get(), storage.data(), bytes, cudaMemcpyDeviceToDevice,
                                       c10::cuda::getCurrentCUDAStream(storage.device().index())));
#endif
    }
    storage.set_data_ptr_noswap(std::move(copy));
}

}  // namespace

bool is_lent(const c10::StorageImpl& storage) {
    return storage.nbytes() > 0 && storage.data_ptr().get_deleter() == &drop_owner;
}

bool is_shared(const c10::StorageImpl& storage) {
    PyObject* const wrapper = storage.pyobj_slot()->load_pyobj();  // alive while there is another reference
    const size_t kept_by_torch = wrapper && Py_REFCNT(wrapper) == 1 ? 1 : 0;
    return c10::raw::intrusive_ptr::use_count(const_cast<c10::StorageImpl*>(&storage)) > 1 + kept_by_torch;
}

void move_if_lent(c10::StorageImpl& storage) {
    const std::lock_guard lock(moves);
    if (is_lent(storage)) move_to_own_memory(storage);
}

// tensor: [...].
at::Tensor alias_in_place(const at::Tensor& tensor) {
    at::Tensor alias = tensor.detach();
    const std::lock_guard lock(moves);
    c10::Storage storage = alias.storage();
    while (is_lent(*storage.unsafeGetStorageImpl())) {
        auto* const owner = static_cast<c10::StorageImpl*>(storage.data_ptr().get_context());
        storage = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(owner));
    }
    alias.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    return alias;
}

void LentStorages::add(c10::intrusive_ptr<c10::StorageImpl> storage, int position) {
    const std::lock_guard lock(mutex_);
    lent_.push_back({position, this_thread(), std::move(storage)});
}

LentStorages::Holder LentStorages::holder(int position) {
    const void* const thread = this_thread();
    Holder found = Holder::kNone;
    const std::lock_guard lock(mutex_);
    for (const Lent& lent : lent_) {
        if (lent.position < position || !lent.is_held()) continue;
        if (thread && lent.thread && lent.thread != thread) return Holder::kOtherThread;
        found = Holder::kThisThread;
    }
    return found;
}

void LentStorages::protect(int position) {
    const std::lock_guard lock(mutex_);
    for (; !lent_.empty() && lent_.back().position >= position; lent_.pop_back()) {
        if (lent_.back().is_held()) move_if_lent(*lent_.back().storage);
    }
}

StaticTensors::StaticTensors(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
        size_t first = 0;
        while (first < i && !(tensors_[i].defined() && tensors_[first].defined() &&
                              tensors_[first].storage().is_alias_of(tensors_[i].storage()))) {
            ++first;
        }
        first_with_storage_.push_back(static_cast<int>(first));
    }
}

std::vector<at::Tensor> StaticTensors::lend(LentStorages& lent_storages, int position) const {
    std::vector<at::Tensor> lent(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
        if (!tensors_[i].defined()) continue;
        const auto first = static_cast<size_t>(first_with_storage_[i]);
        const bool shares = first < i;
        const c10::VariableVersion version =
            shares ? lent[first].unsafeGetTensorImpl()->version_counter() : c10::VariableVersion(0);
        auto impl = tensors_[i].unsafeGetTensorImpl()->shallow_copy_and_detach(version,
                                                                               /*allow_tensor_metadata_change=*/true);
        if (shares) {
            impl->set_storage_keep_dtype(lent[first].storage());
        } else {
            auto storage = storage_over(tensors_[i].storage());
            lent_storages.add(storage, position);
            impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
        }
        lent[i] = at::Tensor(std::move(impl));
    }
    return lent;
}

}  // namespace te_graph::graphs
