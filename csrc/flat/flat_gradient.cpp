#include "flat/flat_gradient.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>

#include "common/autograd_meta.h"
#include "common/current_stream.h"
#include "common/dtype_name.h"
#include "common/leaf.h"
#include "flat/taken_gradients.h"

namespace te_graph::flat {

namespace impl = torch::autograd::impl;
using torch::autograd::variable_list;

namespace {

// Whether a later hook of `leaf` [...], or one on its AccumulateGrad node, needs the gradient as well: then autograd has
// to accumulate it.
bool something_follows(const at::Tensor& leaf) {
    const torch::autograd::AutogradMeta& meta = *autograd_meta_of(leaf);
    if (meta.post_acc_grad_hooks_ || !dynamic_cast<const GradViewHook*>(meta.hooks_.back().get())) return true;
    const auto accumulator = impl::try_get_grad_accumulator(leaf);
    return accumulator && (!accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty());
}

}  // namespace

FlatGradient::FlatGradient(size_t number, std::string name, const at::Tensor& parameter, at::Tensor data,
                           at::Tensor memory, std::shared_ptr<MainGradReset> reset,
                           const std::shared_ptr<Backwards>& backwards)
    : number_(number),
      name_(std::move(name)),
      parameter_(parameter.getIntrusivePtr()),
      data_(std::move(data)),
      memory_(std::move(memory)),
      data_address_(data_.const_data_ptr()),
      memory_address_(memory_.const_data_ptr()),
      reset_(std::move(reset)),
      backwards_(backwards),
      static_({memory_}) {}

void FlatGradient::attach() {
    auto& hooks = impl::hooks(parameter());
    // That of a FlatParameters that is gone.
    std::erase_if(hooks, [](const auto& hook) { return dynamic_cast<const GradViewHook*>(hook.get()); });
    hooks.push_back(std::make_unique<GradViewHook>(shared_from_this()));
}

void FlatGradient::detach() {
    const at::Tensor parameter = this->parameter();
    if (!parameter.defined()) return;
    auto& hooks = impl::hooks(parameter);
    std::erase_if(hooks, [&](const auto& hook) {
        const auto* const own = dynamic_cast<const GradViewHook*>(hook.get());
        return own && own->view.get() == this;
    });
}

at::Tensor FlatGradient::parameter() const {
    auto parameter = parameter_.lock();
    return parameter ? at::Tensor(std::move(parameter)) : at::Tensor();
}

std::string FlatGradient::change() const {
    const at::Tensor parameter = this->parameter();
    if (!parameter.defined()) return c10::str(name_, " is gone");
    if (parameter.scalar_type() != data_.scalar_type()) {
        return c10::str(name_, " is now of dtype ", dtype_name(parameter.scalar_type()), ", it was ",
                        dtype_name(data_.scalar_type()));
    }
    if (parameter.device() != data_.device()) {
        return c10::str(name_, " is now on ", parameter.device(), ", it was on ", data_.device());
    }
    if (parameter.numel() > 0 && parameter.const_data_ptr() != data_.const_data_ptr()) {
        return c10::str(name_, " has moved to other memory");
    }
    if (data_.const_data_ptr() != data_address_ || memory_.const_data_ptr() != memory_address_) {
        return c10::str(name_, data_.const_data_ptr() != data_address_ ? "" : ".main_grad",
                        " has moved to memory that processes share (by share_memory(), or a queue of "
                        "torch.multiprocessing): share a clone");
    }
    if (parameter.sizes() != data_.sizes() || parameter.strides() != data_.strides()) {
        return c10::str(name_, " is now of shape ", parameter.sizes(), " and strides ", parameter.strides(),
                        ", it was of ", data_.sizes(), " and ", data_.strides());
    }
    if (!parameter.requires_grad()) return c10::str(name_, " is now frozen (requires_grad is False)");
    if (grad_view_of(*autograd_meta_of(parameter)) != this) {
        return c10::str(name_, " has lost the hook by which its gradient is known (_backward_hooks was set)");
    }
    return {};
}

bool FlatGradient::is_memory(const at::Tensor& grad) const {
    return grad.layout() == at::kStrided && grad.scalar_type() == memory_.scalar_type() &&
           grad.device() == memory_.device() && grad.strides() == memory_.strides() &&
           grad.const_data_ptr() == memory_address_;
}

FlatGradient::State FlatGradient::state() const {
    const at::Tensor& grad = parameter().grad();
    if (grad.defined()) return is_memory(grad) ? State::kInPlace : State::kElsewhere;
    if (reset_ && !reset_->is_pending) return State::kInPlace;
    forget_alike();
    return State::kMissing;
}

std::string FlatGradient::describe(State state) const {
    const char* const text = state == State::kMissing   ? " is missing"
                             : state == State::kInPlace ? " is there"
                                                        : " is another tensor than that of the flat buffer";
    return "the gradient of " + name_ + text;
}

at::Tensor FlatGradient::elsewhere() const { return state() == State::kElsewhere ? parameter().grad() : at::Tensor(); }

void FlatGradient::adopt() {
    if (reset_) {
        reset_->is_pending = false;
        return;
    }
    const at::Tensor parameter = this->parameter();
    if (!parameter.grad().defined()) parameter.mutable_grad() = renew();
}

void FlatGradient::note_written() const {
    const at::Tensor grad = reset_ ? memory_ : parameter().grad();
    if (grad.defined() && is_memory(grad)) grad.unsafeGetTensorImpl()->bump_version();
}

void FlatGradient::note_data_written() const { parameter().unsafeGetTensorImpl()->bump_version(); }

void FlatGradient::drop() {
    const at::Tensor parameter = this->parameter();
    if (parameter.defined()) parameter.mutable_grad().reset();
    if (reset_) reset_->is_pending = true;
    forget_alike();
}

void FlatGradient::note_reduced() {
    forget_alike();
    if (state() != State::kMissing) reduced_ = Reduced::kNow;
}

void FlatGradient::note_zero() {
    forget_alike();
    if (state() != State::kMissing) zero_ = parameter().grad().unsafeGetTensorImpl();
}

bool FlatGradient::take_reduced() {
    zero_ = nullptr;
    if (state() == State::kMissing || reduced_ != Reduced::kNow) return false;
    reduced_ = Reduced::kTaken;
    return true;
}

bool FlatGradient::is_taken() const { return state() != State::kMissing && reduced_ == Reduced::kTaken; }

bool FlatGradient::is_unreduced() const {
    const at::Tensor parameter = this->parameter();
    const at::Tensor& grad = parameter.grad();
    // Where nothing is wrong no more than this is asked, by each step of each parameter.
    const bool is_reduced = reduced_ == Reduced::kNow;
    if (is_reduced && (reset_ ? !grad.defined() && !reset_->is_pending : grad.defined())) return false;
    const State state = this->state();
    if (state == State::kMissing || zero_ == grad.unsafeGetTensorImpl()) return false;
    // Beside a main_grad, which has been reduced, .grad has not.
    return !is_reduced || state == State::kElsewhere;
}

void FlatGradient::put_back(const Alike& before) {
    if (reduced_ == Reduced::kNot) reduced_ = before.reduced;
    zero_ = before.zero;
}

void FlatGradient::forget_alike() const {
    reduced_ = Reduced::kNot;
    zero_ = nullptr;
}

void FlatGradient::enter_backward() {
    const auto backwards = backwards_.lock();
    TORCH_CHECK(backwards, "FlatParameters: the gradient of ", name_,
                " lies in the buffer of a FlatParameters that is gone: keep it for as long as the model trains");
    backwards->enter(number_, name_);
}

void FlatGradient::note_accumulated() {
    if (const auto backwards = backwards_.lock()) backwards->note_accumulated(number_, stream());
}

int64_t FlatGradient::stream() const { return memory_.is_cpu() ? 0 : current_stream(memory_.device()).id(); }

bool FlatGradient::is_awaited() const {
    const auto backwards = backwards_.lock();
    return backwards && backwards->looks_early();
}

at::Tensor FlatGradient::renew() {
    protect();
    return static_.lend(lent_).front();
}

variable_list FlatGradient::receive(const variable_list& grads) {
    const at::Tensor parameter = this->parameter();
    if (!parameter.defined() || !parameter.requires_grad() || !accumulates_into(parameter)) return grads;
    enter_backward();
    const at::Tensor& grad = grads.front();
    if (!grad.defined()) {  // what computes it has added it up by itself, or there is none
        note_accumulated();
        return grads;
    }
    TORCH_CHECK_TYPE(grad.layout() == at::kStrided, "FlatParameters: expected a dense gradient of ", name_,
                     ", got one of layout ", grad.layout(), " (torch.nn.Embedding: sparse=False)");
    // Left to AccumulateGrad are a gradient with a graph of its own, one for a .grad of the user's, and that which
    // others wait for. For a main_grad it is fetched at the end of the backward.
    {
        const std::lock_guard lock(accumulates_);
        const at::Tensor& there = parameter.grad();
        const bool is_elsewhere = there.defined() && (reset_ || !is_memory(there));
        if (at::GradMode::is_enabled() || is_elsewhere || something_follows(parameter)) {
            if (const auto backwards = backwards_.lock()) backwards->note_received(number_, stream());
            if (at::GradMode::is_enabled() || there.defined() || reset_) return grads;
            return {stored(grad)};
        }
        if (reset_) {
            if (reset_->is_pending.exchange(false)) {
                memory_.copy_(grad);
            } else {
                memory_.add_(grad);
            }
        } else if (there.defined()) {
            parameter.mutable_grad().add_(grad);
        } else {
            parameter.mutable_grad() = stored(grad);
        }
    }
    note_accumulated();
    return {at::Tensor()};
}

at::Tensor FlatGradient::stored(const at::Tensor& grad) {
    at::Tensor fresh = renew();
    fresh.copy_(grad);
    return fresh;
}

}  // namespace te_graph::flat
