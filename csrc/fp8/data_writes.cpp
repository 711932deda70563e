#include "fp8/data_writes.h"

#include <ATen/core/VariableHooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common/note_writes.h"

namespace te_graph::fp8 {
namespace {

using at::TensorBase;
using c10::VariableVersion;

// The counters of tensors over one storage.
class Counters {
public:
    explicit Counters(c10::weak_intrusive_ptr<c10::StorageImpl> storage) : storage_(std::move(storage)) {}

    // Returns its number, of those so far.
    int64_t add(const VariableVersion& counter) {
        fold();
        const auto is_it = [&](const Counter& one) { return is_same(one.counter, counter); };
        const auto found = std::find_if(counters_.begin(), counters_.end(), is_it);
        if (found != counters_.end()) return found->number;
        counters_.push_back({counter, counter.current_version(), ++last_});
        return last_;
    }
    // Writes since they were added.
    int64_t count() {
        fold();
        int64_t sum = of_gone_;
        for (const Counter& one : counters_) sum += one.count();
        return sum;
    }
    int64_t last() const { return last_; }
    bool is_of_gone_storage() const { return storage_.expired(); }

private:
    struct Counter {
        VariableVersion counter;
        uint32_t before;
        int64_t number;
        int64_t count() const { return static_cast<int64_t>(counter.current_version()) - before; }
    };
    // A counter is a pointer to what its copies share, which it does not show.
    static bool is_same(const VariableVersion& a, const VariableVersion& b) {
        static_assert(sizeof(VariableVersion) == sizeof(void*));
        return std::memcmp(&a, &b, sizeof(a)) == 0;
    }
    // Nothing can be written any more through tensors that are gone.
    void fold() {
        const auto gone = std::partition(counters_.begin(), counters_.end(),
                                         [](const Counter& one) { return !one.counter.unique(); });
        for (auto one = gone; one != counters_.end(); ++one) of_gone_ += one->count();
        counters_.erase(gone, counters_.end());
    }

    // So that no other storage takes its address.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
    std::vector<Counter> counters_;
    int64_t of_gone_ = 0, last_ = 0;
};

// Of all storages in this process.
class Registry {
public:
    // tensor: [...], through which its storage may be written from now on.
    void add(const TensorBase& tensor) {
        if (!tensor.defined() || !tensor.has_storage()) return;
        const VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
        if (!counter.enabled()) return;
        const std::lock_guard lock(mutex_);
        counters_of(tensor).add(counter);
    }
    // tensor: [...].
    WriteCount count(const at::Tensor& tensor) {
        const std::lock_guard lock(mutex_);
        Counters& counters = counters_of(tensor);
        number_of(tensor, counters);
        return {counters.last(), counters.count()};
    }
    // tensor: [...].
    bool is_written_since(const at::Tensor& tensor, const WriteCount& before) {
        const std::lock_guard lock(mutex_);
        Counters& counters = counters_of(tensor);
        return number_of(tensor, counters) > before.counters || counters.count() != before.writes;
    }

private:
    // Of tensor [...]; 0: it counts nothing.
    static int64_t number_of(const at::Tensor& tensor, Counters& counters) {
        const VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
        return counter.enabled() ? counters.add(counter) : 0;
    }
    // Of the storage of tensor [...].
    Counters& counters_of(const TensorBase& tensor) {
        if (counters_.size() >= most_) remove_gone();
        c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
        return counters_.try_emplace(storage, tensor.storage().getWeakStorageImpl()).first->second;
    }
    void remove_gone() {
        std::erase_if(counters_, [](const auto& entry) { return entry.second.is_of_gone_storage(); });
        most_ = std::max<size_t>(kFew, 2 * counters_.size());
    }

    static constexpr size_t kFew = 1024;
    std::mutex mutex_;
    std::unordered_map<const c10::StorageImpl*, Counters> counters_;
    size_t most_ = kFew;  // before those of gone storages are removed
};

// Never destroyed: tensors are read and written until the process ends.
Registry& registry() {
    static auto* const instance = new Registry;
    return *instance;
}

// torch's own, which also tell the registry.
class Hooks final : public at::impl::VariableHooksInterface {
public:
    explicit Hooks(const VariableHooksInterface& torch) : torch_(torch) {}

    TensorBase variable_data(const TensorBase& self) const override {
        TensorBase result = torch_.variable_data(self);
        registry().add(self);
        registry().add(result);
        return result;
    }
    void set_data(const TensorBase& self, const TensorBase& data) const override {
        torch_.set_data(self, data);
        registry().add(self);
        registry().add(data);
    }

    TensorBase tensor_data(const TensorBase& self) const override { return torch_.tensor_data(self); }
    const std::shared_ptr<torch::autograd::Node>& grad_fn(const TensorBase& self) const override {
        return torch_.grad_fn(self);
    }
    unsigned _register_hook(const TensorBase& self, std::function<TensorBase(const TensorBase&)> hook) const override {
        return torch_._register_hook(self, std::move(hook));
    }
    void remove_hook(const TensorBase& self, unsigned place) const override { torch_.remove_hook(self, place); }
    bool is_view(const TensorBase& self) const override { return torch_.is_view(self); }
    const TensorBase& base(const TensorBase& self) const override { return torch_.base(self); }
    const std::string& name(const TensorBase& self) const override { return torch_.name(self); }
    bool is_leaf(const TensorBase& self) const override { return torch_.is_leaf(self); }
    int64_t output_nr(const TensorBase& self) const override { return torch_.output_nr(self); }
    TensorBase data(const TensorBase& self) const override { return torch_.data(self); }
    int64_t _version(const TensorBase& self) const override { return torch_._version(self); }
    void retain_grad(const TensorBase& self) const override { torch_.retain_grad(self); }
    bool retains_grad(const TensorBase& self) const override { return torch_.retains_grad(self); }
    // self: [...]; inputs: [...] each; gradient: as self.
    void _backward(const at::Tensor& self, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                   std::optional<bool> keep_graph, bool create_graph) const override {
        torch_._backward(self, inputs, gradient, keep_graph, create_graph);
    }
    void requires_grad_(const TensorBase& self, bool value) const override { torch_.requires_grad_(self, value); }
    void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                                 torch::jit::Stack* stack) const override {
        torch_.basic_autograd_not_implemented_fallback(op, keys, stack);
    }
    std::optional<c10::ScalarType> grad_dtype(const TensorBase& self) const override { return torch_.grad_dtype(self); }
    void set_grad_dtype(const TensorBase& self, const std::optional<c10::ScalarType>& dtype) const override {
        torch_.set_grad_dtype(self, dtype);
    }

private:
    const VariableHooksInterface& torch_;
};

}  // namespace

void watch_data() {
    static const bool is_watching = [] {
        at::impl::SetVariableHooks(new Hooks(*at::impl::GetVariableHooks()));
        return true;
    }();
    static_cast<void>(is_watching);
}

// tensor: [...].
WriteCount write_count(const at::Tensor& tensor) {
    return tensor.has_storage() ? registry().count(tensor) : WriteCount{0, version_of(tensor)};
}

// tensor: [...].
bool is_written_since(const at::Tensor& tensor, const WriteCount& before) {
    return tensor.has_storage() ? registry().is_written_since(tensor, before) : version_of(tensor) != before.writes;
}

}  // namespace te_graph::fp8
