#include "graphs/callables/callable.h"

namespace te_graph::graphs {

GraphedCallable::GraphedCallable(std::string name, at::Device device, std::shared_ptr<ReplayOrder> replay_order,
                                 std::shared_ptr<CallableGuard> guard, std::vector<InputSpec> inputs,
                                 std::vector<ParameterSpec> parameters, const std::vector<ExternalSpec>& externals,
                                 std::vector<int> differentiable, std::vector<bool> saved_outputs,
                                 std::vector<bool> inner_outputs, std::vector<ResultSpec> results,
                                 const std::shared_ptr<GraphedCallable>& predecessor,
                                 std::shared_ptr<CallableGuard> backward_guard,
                                 std::vector<NonlinearPart> nonlinear_parts, bool compares_autocast_cache,
                                 bool compares_autocast_dtype)
    : name_(std::move(name)),
      device_(device),
      replay_order_(std::move(replay_order)),
      guard_(std::move(guard)),
      backward_guard_(std::move(backward_guard)),
      nonlinear_parts_(std::move(nonlinear_parts)),
      settings_(device.type(),
                {.with_autocast_cache = compares_autocast_cache, .with_autocast_dtype = compares_autocast_dtype}),
      inputs_(std::move(inputs)),
      parameters_(std::move(parameters)),
      differentiable_(std::move(differentiable)),
      saved_outputs_(std::move(saved_outputs)),
      inner_outputs_(std::move(inner_outputs)),
      results_(std::move(results)),
      predecessor_(predecessor ? predecessor->leases_ : nullptr),
      leases_(std::make_shared<SlotLeases>(predecessor_)),
      position_(predecessor ? predecessor->position_ + 1 : 0),
      lent_(predecessor ? predecessor->lent_ : std::vector<std::shared_ptr<LentStorages>>()),
      buffers_(parameters_.size()) {
    for (size_t i = 0; i < externals.size(); ++i) {
        if (externals[i].saved) saved_.push_back(i);
        if (externals[i].written) written_.push_back(i);
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
        lent_buffers_.push_back(parameters_[i].has_grad_buffer ? std::make_unique<LentStorages>() : nullptr);
        if (parameters_[i].has_grad_buffer) buffered_.push_back(i);
    }
}

int GraphedCallable::visit_guards(visitproc visit, void* arg) const {
    if (const int stop = guard_->visit(visit, arg)) return stop;
    return backward_guard_ ? backward_guard_->visit(visit, arg) : 0;
}

void GraphedCallable::clear_guards() const {
    for (CallableGuard* const guard : {guard_.get(), backward_guard_.get()}) {
        if (!guard) continue;
        guard->forget();
        guard->drop_held();
    }
}

void GraphedCallable::add_slot(std::unique_ptr<Slot> slot) {
    if (lent_.size() == slots_.size()) lent_.push_back(std::make_shared<LentStorages>());
    slot->lent_outputs = lent_[slots_.size()];
    slots_.push_back(std::move(slot));
    leases_->add();
}

std::vector<std::shared_ptr<CapturedGraph>> GraphedCallable::graphs() const {
    std::vector<std::shared_ptr<CapturedGraph>> graphs;
    for (const auto& slot : slots_) {
        graphs.push_back(slot->forward);
        if (slot->backward) graphs.push_back(slot->backward);
    }
    return graphs;
}

ReplayMiss GraphedCallable::changed(const std::string& change) const {
    return {ReplayMiss::Kind::kCircumstances,
            name_ + ": " + change +
                " since capture; call .te_graph.reset() on the callable, or capture with on_mismatch=\"capture\""};
}

}  // namespace te_graph::graphs
