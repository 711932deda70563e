#include "common/host_steps.h"

#include <algorithm>

namespace te_graph {
namespace {

thread_local std::vector<std::shared_ptr<HostSteps>> entered;

}  // namespace

std::shared_ptr<HostSteps> HostSteps::current() { return entered.empty() ? nullptr : entered.back(); }
void HostSteps::enter(std::shared_ptr<HostSteps> steps) { entered.push_back(std::move(steps)); }
void HostSteps::leave() {
    for (const auto& step : entered.back()->forward_) step->end_capture();
    entered.pop_back();
}

HostStep* HostSteps::find(const List& list, const void* identity) {
    const auto is_it = [&](const auto& step) { return step->identity() == identity; };
    const auto found = std::find_if(list.begin(), list.end(), is_it);
    return found == list.end() ? nullptr : found->get();
}

bool HostSteps::add(List& list, std::shared_ptr<HostStep> step) {
    if (find(list, step->identity()) != nullptr) return false;
    list.push_back(std::move(step));
    return true;
}

void HostSteps::prepare(const List& list) {
    for (const auto& step : list) step->prepare();
}

void HostSteps::run(const List& list) {
    for (const auto& step : list) step->run();
}

void HostSteps::finish_forward() const {
    for (const auto& step : forward_) step->finish();
}

void HostSteps::add(const HostSteps& other) {
    for (const auto& step : other.forward_) add(forward_, step);
    for (const auto& step : other.backward_) add(backward_, step);
}

}  // namespace te_graph
