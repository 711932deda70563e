// Static memory lent to the user as ordinary tensors.
//
// A graph writes its results to the same memory at every replay. What the user gets is a tensor with a StorageImpl of
// its own over that memory: no copy. Before the memory is overwritten, every such StorageImpl that is still held
// (directly, through a view, or inside an autograd node) is moved to a copy in ordinary memory, so no value ever
// changes under its holder.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <mutex>
#include <vector>

namespace te_graph::graphs {

// True while the memory of `storage` is lent: until it was moved, resized or exchanged.
bool is_lent(const c10::StorageImpl& storage);

// Moves `storage` to memory of its own if it is lent. Called before its address is given to code that does not
// know of the StorageImpl.
void move_if_lent(c10::StorageImpl& storage);

// An alias of `tensor` [...], of no autograd graph, that stays where the memory is now when a lent storage moves, as
// the address in a graph does.
at::Tensor alias_in_place(const at::Tensor& tensor);

// True where more than the caller's reference is left of `storage`. A Python object that torch once made for it, and
// keeps and counts from then on, matters only while Python code holds that.
bool is_shared(const c10::StorageImpl& storage);

// StorageImpls that have been lent over memory that will be overwritten.
//
// Graphs that run one after the other may share memory: each may overwrite its own results and those of later ones, not
// those of earlier ones. They share one list, and have positions.
//
// What one thread was lent another one must not move: an operation may just have read the address.
class LentStorages {
public:
    // All of `position` and later ones have been protected.
    void add(c10::intrusive_ptr<c10::StorageImpl> storage, int position = 0);
    // The thread that holds some of what protect() would move. A thread of autograd stands for the one that waits for
    // its backward.
    enum class Holder { kNone, kThisThread, kOtherThread };
    Holder holder(int position = 0);
    // To be called before the memory of `position` and later ones is overwritten, on the stream that will overwrite it.
    void protect(int position = 0);

private:
    struct Lent {
        int position;
        const void* thread;  // null for those of autograd
        c10::intrusive_ptr<c10::StorageImpl> storage;
        bool is_held() const { return is_lent(*storage) && is_shared(*storage); }
    };
    std::mutex mutex_;
    std::vector<Lent> lent_;  // positions ascend
};

// Fixed tensors of a slot that are lent after each replay.
class StaticTensors {
public:
    // tensors: the memory that the graph writes; undefined ones are lent as undefined.
    explicit StaticTensors(std::vector<at::Tensor> tensors);

    // Fresh tensors over the static memory. Those that share memory share a StorageImpl and a version counter, as views
    // of one tensor do. The memory outlives the slot for as long as one of them is held.
    std::vector<at::Tensor> lend(LentStorages& lent_storages, int position = 0) const;

    const std::vector<at::Tensor>& tensors() const { return tensors_; }

private:
    std::vector<at::Tensor> tensors_;
    std::vector<int> first_with_storage_;  // for each tensor, the index of the first one with the same storage
};

}  // namespace te_graph::graphs
