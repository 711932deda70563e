#include "common/host_steps.h"

#include <algorithm>

namespace te_graph {
namespace {

thread_local std::vector<std::shared_ptr<HostSteps>> entered;

}  // namespace

std::shared_ptr<HostSteps> HostSteps::current() { return entered.empty() ? nullptr : entered.back(); }
void HostSteps::enter(std::shared_ptr<HostSteps> steps) {
    ++steps->entered_;
    entered.push_back(std::move(steps));
}
void HostSteps::leave() {
    const std::shared_ptr<HostSteps> steps = std::move(entered.back());
    entered.pop_back();
    if (--steps->entered_ > 0 || steps->has_ended_.exchange(true)) return;
    for (const auto& step : steps->of(Direction::kForward)) step->end_capture();
}

HostStep* HostSteps::find(Direction direction, const void* identity) const {
    const List& list = of(direction);
    const auto is_it = [&](const auto& step) { return step->identity() == identity; };
    const auto found = std::find_if(list.begin(), list.end(), is_it);
    return found == list.end() ? nullptr : found->get();
}

bool HostSteps::add(Direction direction, std::shared_ptr<HostStep> step) {
    if (find(direction, step->identity()) != nullptr) return false;
    lists_[static_cast<size_t>(direction)].push_back(std::move(step));
    return true;
}

void HostSteps::add(const HostSteps& other) {
    for (const Direction direction : kDirections) {
        for (const auto& step : other.of(direction)) add(direction, step);
    }
}

void HostSteps::prepare(Direction direction) const {
    for (const auto& step : of(direction)) step->prepare();
}

void HostSteps::run(Direction direction) const {
    for (const auto& step : of(direction)) step->run();
}

void HostSteps::finish(Direction direction) const {
    for (const auto& step : of(direction)) step->finish();
}

}  // namespace te_graph
