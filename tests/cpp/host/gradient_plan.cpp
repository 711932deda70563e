// decide_gradient against a table that says for each action, without regard to order, when it is the right one.
#include "graphs/callables/gradient_plan.h"

#include <gtest/gtest.h>

#include <ostream>

namespace te_graph::graphs {

std::ostream& operator<<(std::ostream& out, const GradientSituation& now) {
    return out << "reached " << now.reached << ", inputs only " << now.inputs_only << ", through autograd "
               << now.through_autograd << ", hooked since " << now.hooked_since << ", frozen since " << now.frozen_since
               << ", main_grad " << now.has_main_grad << ", main_grad fits " << now.main_grad_fits
               << ", overwrite main_grad " << now.overwrite_main_grad << ", .grad " << now.has_grad << ", .grad fits "
               << now.grad_fits;
}

namespace {

// ---- Reference ----
// Gradients that reach the parameter and that neither autograd nor autograd.grad asks for are the graph's to write.

struct Rule {
    GradientAction action;
    bool (*applies)(const GradientSituation&);
};

bool graph_writes(const GradientSituation& now) {
    return now.reached && !now.inputs_only && !now.through_autograd && !now.hooked_since && !now.frozen_since;
}

constexpr Rule kRules[] = {
    {GradientAction::kNothing,
     [](const GradientSituation& now) {
         return !now.reached || (!now.through_autograd && (now.inputs_only || (now.frozen_since && !now.hooked_since)));
     }},
    {GradientAction::kReturn, [](const GradientSituation& now) { return now.reached && now.through_autograd; }},
    {GradientAction::kCallHooks,
     [](const GradientSituation& now) {
         return now.reached && !now.inputs_only && !now.through_autograd && now.hooked_since;
     }},
    {GradientAction::kStoreMainGrad,
     [](const GradientSituation& now) {
         return graph_writes(now) && now.has_main_grad && now.main_grad_fits && now.overwrite_main_grad;
     }},
    {GradientAction::kAddMainGrad,
     [](const GradientSituation& now) {
         return graph_writes(now) && now.has_main_grad && now.main_grad_fits && !now.overwrite_main_grad;
     }},
    {GradientAction::kStoreMainGradEagerly,
     [](const GradientSituation& now) {
         return graph_writes(now) && now.has_main_grad && !now.main_grad_fits && now.overwrite_main_grad;
     }},
    {GradientAction::kAddMainGradEagerly,
     [](const GradientSituation& now) {
         return graph_writes(now) && now.has_main_grad && !now.main_grad_fits && !now.overwrite_main_grad;
     }},
    {GradientAction::kStoreNew,
     [](const GradientSituation& now) { return graph_writes(now) && !now.has_main_grad && !now.has_grad; }},
    {GradientAction::kAddInPlace,
     [](const GradientSituation& now) {
         return graph_writes(now) && !now.has_main_grad && now.has_grad && now.grad_fits;
     }},
    {GradientAction::kAddEagerly,
     [](const GradientSituation& now) {
         return graph_writes(now) && !now.has_main_grad && now.has_grad && !now.grad_fits;
     }},
};

TEST(PlanGradient, FollowsTheTableInEverySituation) {
    for (unsigned bits = 0; bits < 1u << 10; ++bits) {
        const auto flag = [bits](unsigned place) { return (bits >> place & 1) != 0; };
        const GradientSituation now{.reached = flag(0),
                                    .inputs_only = flag(1),
                                    .through_autograd = flag(2),
                                    .hooked_since = flag(3),
                                    .frozen_since = flag(4),
                                    .has_main_grad = flag(5),
                                    .main_grad_fits = flag(6),
                                    .overwrite_main_grad = flag(7),
                                    .has_grad = flag(8),
                                    .grad_fits = flag(9)};
        int rules = 0;
        for (const Rule& rule : kRules) {
            rules += rule.applies(now);
            EXPECT_EQ(decide_gradient(now) == rule.action, rule.applies(now)) << now;
        }
        EXPECT_EQ(rules, 1) << now;  // the table is complete and says one thing
    }
}

TEST(PlanGradient, OfAPlainParameterStoresFirstAndAddsAfterwards) {
    EXPECT_EQ(decide_gradient({}), GradientAction::kStoreNew);
    EXPECT_EQ(decide_gradient({.has_grad = true, .grad_fits = true}), GradientAction::kAddInPlace);
}

}  // namespace
}  // namespace te_graph::graphs
