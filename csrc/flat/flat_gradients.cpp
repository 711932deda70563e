#include "flat/flat_gradients.h"

#include <algorithm>

#include "common/host_steps.h"

namespace te_graph::flat {

class FlatGradients::Step final : public HostStep {
public:
    Step(std::shared_ptr<FlatGradients> set, Event event) : set_(std::move(set)), event_(event) {
        for (const auto& gradient : set_->gradients_) states_.push_back(gradient->state());
    }

    std::string change() const override {
        if (event_ != Event::kRead) return {};
        for (size_t i = 0; i < states_.size(); ++i) {
            const FlatGradient& gradient = *set_->gradients_[i];
            const FlatGradient::State state = gradient.state();
            if (state == FlatGradient::State::kElsewhere) return gradient.describe(state);
            if (state != states_[i]) return gradient.describe(state) + ", which was not so at capture";
        }
        return {};
    }
    void finish() override { set_->run(event_); }
    const void* identity() const override { return &set_->identities_[static_cast<size_t>(event_)]; }

private:
    const std::shared_ptr<FlatGradients> set_;
    const Event event_;
    std::vector<FlatGradient::State> states_;
};

std::string FlatGradients::first_change() const {
    for (const auto& gradient : gradients_) {
        if (std::string change = gradient->change(); !change.empty()) return change;
    }
    return {};
}

template <typename Predicate>
FlatGradients::Numbers FlatGradients::numbers_of(Predicate holds) const {
    Numbers found;
    for (size_t i = 0; i < gradients_.size(); ++i) {
        if (holds(*gradients_[i])) found.push_back(i);
    }
    return found;
}

FlatGradients::Numbers FlatGradients::missing() const {
    return numbers_of([](const FlatGradient& gradient) { return gradient.state() == FlatGradient::State::kMissing; });
}

std::vector<std::pair<size_t, at::Tensor>> FlatGradients::elsewhere() const {
    std::vector<std::pair<size_t, at::Tensor>> found;
    for (size_t i = 0; i < gradients_.size(); ++i) {
        if (at::Tensor grad = gradients_[i]->elsewhere(); grad.defined()) found.emplace_back(i, std::move(grad));
    }
    return found;
}

FlatGradients::Numbers FlatGradients::unreduced() const {
    return numbers_of([](const FlatGradient& gradient) { return gradient.is_unreduced(); });
}

FlatGradients::Numbers FlatGradients::take_reduced() {
    return numbers_of([](FlatGradient& gradient) { return gradient.take_reduced(); });
}

FlatGradients::Numbers FlatGradients::taken() const {
    return numbers_of([](const FlatGradient& gradient) { return gradient.is_taken(); });
}

void FlatGradients::note(Event event) {
    // Before it runs: what a replay meets is what is there by now.
    if (const auto steps = HostSteps::current()) {
        steps->add(Direction::kForward, std::make_shared<Step>(shared_from_this(), event));
    }
    run(event);
}

void FlatGradients::run(Event event) {
    for (const auto& gradient : gradients_) {
        switch (event) {
            case Event::kRead:
                break;
            case Event::kReduced:
                gradient->note_reduced();
                [[fallthrough]];
            case Event::kWritten:
                gradient->note_written();
                break;
            case Event::kStepped:  // an optimizer passes over parameters without a gradient
                if (gradient->state() != FlatGradient::State::kMissing) gradient->note_data_written();
                break;
            case Event::kParametersWritten:
                gradient->note_data_written();
                break;
            case Event::kDropped:
                gradient->drop();
                break;
            case Event::kCount:
                break;
        }
    }
}

}  // namespace te_graph::flat
