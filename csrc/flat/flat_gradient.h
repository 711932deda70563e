// The gradient of one parameter, which lies in a flat buffer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "common/grad_view.h"
#include "flat/backwards.h"
#include "graphs/callables/lent_storages.h"

namespace te_graph::flat {

class FlatGradient final : public GradView, public std::enable_shared_from_this<FlatGradient> {
public:
    // number: by which `backwards` knows it.
    // name: of the parameter, for messages.
    // parameter: [...], a leaf.
    // data, memory: [...] like the parameter, where its values and its gradient lie in flat buffers.
    // reset: of its main_grad; null: the memory is .grad.
    FlatGradient(size_t number, std::string name, const at::Tensor& parameter, at::Tensor data, at::Tensor memory,
                 std::shared_ptr<MainGradReset> reset, const std::shared_ptr<Backwards>& backwards);

    void attach();
    void detach();

    // What has happened to the parameter that ends its being flat; empty: nothing.
    std::string change() const;
    // Whether there is a gradient, and where: in the memory, or in a .grad that is another tensor.
    enum class State { kMissing, kInPlace, kElsewhere };
    State state() const;
    // "the gradient of weight is missing"
    std::string describe(State state) const;
    // The gradient [...] where it lies elsewhere, or undefined.
    at::Tensor elsewhere() const;
    // Makes the memory the gradient: sets .grad, or marks main_grad as there. The caller overwrites it.
    void adopt();
    // Who holds what is .grad, or the parameter, sees by its version that it has been written.
    void note_written() const;
    void note_data_written() const;
    // Drops the gradient: the next one is stored.
    void drop();

    // Ranks have it alike from now on, until it is dropped, or is seen missing: it has been reduced, which holds for
    // what takes its place, too, as p.grad = p.grad * 2; or it has been set to zero, which does not.
    void note_reduced();
    void note_zero();
    // Whether it is there, and has been reduced. More comes to it now, which ranks do not have alike.
    bool take_reduced();
    // Whether it is there, and has not been dropped since it was taken.
    bool is_taken() const;
    // Whether it is there, and is that of this rank alone.
    bool is_unreduced() const;
    // Ranks that have it alike, as it is known now; and that is known again, where it has been forgotten since: what a
    // capture has dropped is there again behind it.
    enum class Reduced { kNot, kNow, kTaken };
    struct Alike {
        Reduced reduced;
        const void* zero;
    };
    Alike alike() const { return {reduced_, zero_}; }
    void put_back(const Alike& before);

    void enter_backward() override;
    void note_accumulated() override;
    bool is_awaited() const override;
    const at::Tensor& memory() const override { return memory_; }
    const std::shared_ptr<MainGradReset>& main_grad_reset() const override { return reset_; }
    void protect() override { lent_.protect(); }
    at::Tensor renew() override;
    torch::autograd::variable_list receive(const torch::autograd::variable_list& grads) override;

private:
    at::Tensor parameter() const;
    bool is_memory(const at::Tensor& grad) const;
    at::Tensor stored(const at::Tensor& grad);  // a .grad [...] over the memory, with the values of grad [...]
    int64_t stream() const;                     // that the caller launches on
    void forget_alike() const;

    const size_t number_;
    const std::string name_;
    const c10::weak_intrusive_ptr<c10::TensorImpl> parameter_;
    const at::Tensor data_, memory_;
    const void *const data_address_, *const memory_address_;  // in the buffers; to share a storage moves it
    const std::shared_ptr<MainGradReset> reset_;
    const std::weak_ptr<Backwards> backwards_;
    const graphs::StaticTensors static_;
    graphs::LentStorages lent_;
    std::mutex accumulates_;  // as AccumulateGrad has one: several backwards may run
    // Of ranks that have it alike. Whoever finds it missing forgets that.
    mutable std::atomic<Reduced> reduced_{Reduced::kNot};
    mutable std::atomic<const void*> zero_{nullptr};  // the .grad that is zero; null: none
};

}  // namespace te_graph::flat
