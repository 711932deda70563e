#include "common/host_steps.h"

#include <algorithm>

namespace te_graph {
namespace {

thread_local std::vector<std::shared_ptr<HostSteps>> entered;

}  // namespace

std::shared_ptr<HostSteps> HostSteps::current() { return entered.empty() ? nullptr : entered.back(); }
void HostSteps::enter(std::shared_ptr<HostSteps> steps) { entered.push_back(std::move(steps)); }
void HostSteps::leave() { entered.pop_back(); }

bool HostSteps::add(List& list, std::shared_ptr<HostStep> step) {
    const auto does_the_same = [&](const auto& other) { return other->identity() == step->identity(); };
    if (std::any_of(list.begin(), list.end(), does_the_same)) return false;
    list.push_back(std::move(step));
    return true;
}

void HostSteps::prepare(const List& list) {
    for (const auto& step : list) step->prepare();
}

void HostSteps::run(const List& list) {
    for (const auto& step : list) step->run();
}

void HostSteps::add(const HostSteps& other) {
    for (const auto& step : other.forward_) add(forward_, step);
    for (const auto& step : other.backward_) add(backward_, step);
}

}  // namespace te_graph
