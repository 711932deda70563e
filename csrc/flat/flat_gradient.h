// The gradient of one parameter, which lies in a flat buffer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

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
};

}  // namespace te_graph::flat
