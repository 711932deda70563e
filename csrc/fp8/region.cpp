#include "fp8/region.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <string>

#include "common/host_steps.h"

namespace py = pybind11;

namespace te_graph::fp8 {
namespace {

thread_local int64_t current_region = 0;

class RegionStep : public HostStep {
public:
    std::string change() const override {
        const int64_t now = region();
        if (now == captured_) return {};
        if (captured_ == 0) return "te_graph.fp8_autocast was entered";
        if (now == 0) return "te_graph.fp8_autocast was left";
        return "an argument of te_graph.fp8_autocast (enabled, calibrating, recipe, amax_reduction_group) changed";
    }
    const void* identity() const override {
        static const char one_for_all = 0;
        return &one_for_all;
    }

private:
    const int64_t captured_ = region();
};

// What a checkpoint computes again is to take the scales of its first time, and to record nothing: its notes tell (see
// te_graph/fp8/recomputation.py), which an eager call leaves and finds, and a replay does not.
class CheckpointStep : public HostStep {
public:
    std::string obstacle() const override {
        if (!may_be_checkpointed()) return {};
        const py::object is_checkpointed = py::module_::import("te_graph.fp8.recomputation").attr("is_checkpointed");
        if (!is_checkpointed().cast<bool>()) return {};
        return "called inside activation checkpointing, where FP8 layers take the scales of their first call when they "
               "are computed again";
    }
    const void* identity() const override {
        static const char one_for_all = 0;
        return &one_for_all;
    }

private:
    static bool may_be_checkpointed() {
        return !at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() != -1 ||
               !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
    }
};

}  // namespace

int64_t region() { return current_region; }
void set_region(int64_t number) { current_region = number; }

void note_call(bool began_before) {
    const auto steps = HostSteps::current();
    if (!steps) return;
    steps->add(Direction::kForward, std::make_shared<CheckpointStep>());
    if (began_before) steps->add(Direction::kForward, std::make_shared<RegionStep>());
}

}  // namespace te_graph::fp8
