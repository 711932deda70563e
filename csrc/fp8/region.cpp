#include "fp8/region.h"

#include "common/host_steps.h"

namespace te_graph::fp8 {
namespace {

thread_local int64_t current_region = 0;

class RegionStep : public HostStep {
public:
    std::string change() const override {
        const int64_t now = region();
        if (now == captured_) return {};
        if (captured_ == 0) return "te_graph.fp8_autocast was entered";
        return now == 0 ? "te_graph.fp8_autocast was left" : "the recipe or the group of te_graph.fp8_autocast changed";
    }
    const void* identity() const override {
        static const char one_for_all = 0;
        return &one_for_all;
    }

private:
    const int64_t captured_ = region();
};

}  // namespace

int64_t region() { return current_region; }
void set_region(int64_t number) { current_region = number; }

void note_region() {
    if (const auto steps = HostSteps::current()) steps->add(Direction::kForward, std::make_shared<RegionStep>());
}

}  // namespace te_graph::fp8
