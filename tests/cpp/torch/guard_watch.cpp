// CallableGuard and watched dictionaries: what has not changed is not looked up again, and every change is noticed.
#include <pybind11/eval.h>

#include "guard_test.h"

namespace te_graph::graphs {
namespace {

// A key that counts how often it is looked up.
class CountedKey {
public:
    explicit CountedKey(const std::string& name) {
        py::exec(R"(
class Key(str):
    lookups = 0
    def __hash__(self):
        Key.lookups += 1
        return str.__hash__(self)
)",
                 replay_order);
        key = replay_order["Key"](name);
    }
    // Since the last question.
    int lookups() {
        const int count = replay_order["Key"].attr("lookups").cast<int>();
        replay_order["Key"].attr("lookups") = 0;
        return count;
    }

    py::dict replay_order;
    py::object key;
};

constexpr int kLookupsWhenUnchanged = PY_VERSION_HEX >= 0x030C0000 ? 0 : 1;  // Python tells of changes since 3.12

TEST_F(CallableGuardTest, ADictIsLookedIntoAgainOnlyAfterAChange) {
    CountedKey counted("child");
    const py::list child;
    py::dict root("child"_a = child);
    step(StepKind::kItem, -1, counted.key, child, "child");
    EXPECT_EQ(check(root), "");
    EXPECT_EQ(counted.lookups(), 1);
    EXPECT_EQ(check(root), "");
    EXPECT_EQ(counted.lookups(), kLookupsWhenUnchanged);
    root["other"] = 1;
    EXPECT_EQ(check(root), "");
    EXPECT_EQ(counted.lookups(), 1);
    EXPECT_EQ(check(root), "");
    EXPECT_EQ(counted.lookups(), kLookupsWhenUnchanged);
    root["child"] = py::list();
    for (int repeat = 0; repeat < 2; ++repeat) {  // what was refused is looked at again
        EXPECT_EQ(check(root), "child was replaced by another object");
        EXPECT_EQ(counted.lookups(), repeat == 0 ? 1 + kLookupsWhenUnchanged : 1);
    }
    root["child"] = child;
    EXPECT_EQ(check(root), "");
}

TEST_F(CallableGuardTest, DictsOfStrangersMayChangeWithoutALookup) {
    CountedKey counted("child");
    const py::dict root("child"_a = 1);
    py::dict stranger;
    step(StepKind::kItem, -1, counted.key, none, "child");
    EXPECT_EQ(check(root), "");
    counted.lookups();
    stranger["a"] = 1;
    EXPECT_EQ(check(root), "");
    EXPECT_EQ(counted.lookups(), kLookupsWhenUnchanged);
}

TEST_F(CallableGuardTest, AnotherRootIsWalkedAnew) {
    const py::list child;
    const py::dict root("child"_a = child), same("child"_a = child), other("child"_a = py::list());
    step(StepKind::kItem, -1, py::str("child"), child, "child");
    EXPECT_EQ(check(root), "");
    EXPECT_EQ(check(other), "child was replaced by another object");
    EXPECT_EQ(check(same), "");
    EXPECT_EQ(check(root), "");
}

TEST_F(CallableGuardTest, AttributesThatNoGuardNamesMayChangeWithoutALookup) {
    CountedKey counted("child");
    const py::object root = py::eval("type('Holder', (), {})()");
    root.attr("scale") = 1;
    py::setattr(root, "table", py::dict("child"_a = 1));
    const int members = step(StepKind::kInstanceDict, -1, none, none, "attributes");
    guard.expect_value(step(StepKind::kItem, members, py::str("scale"), none, "scale"), snapshot(py::int_(1)));
    step(StepKind::kAbsent, members, py::str("override"), none, "override");
    const int table = step(StepKind::kItem, members, py::str("table"), none, "table");
    step(StepKind::kItem, table, counted.key, none, "child");
    EXPECT_EQ(check(root), "");
    counted.lookups();
    for (int count = 0; count < 3; ++count) {
        root.attr("step_of_a_trainer") = count;
        EXPECT_EQ(check(root), "");
        EXPECT_EQ(counted.lookups(), kLookupsWhenUnchanged);
    }
    root.attr("scale") = 2;
    EXPECT_EQ(check(root), "scale changed from 1 to 2");
    root.attr("scale") = 1;
    EXPECT_EQ(check(root), "");
    py::exec("vars(root)['over' + 'ride'] = 1", py::dict("root"_a = root));  // another string of the same letters
    EXPECT_EQ(check(root), "override changed");
}

TEST_F(CallableGuardTest, EveryWayOfChangingADictIsNoticedAfterAPassingCheck) {
    const py::list child;
    const py::dict root;
    step(StepKind::kItem, -1, py::str("child"), child, "child");
    step(StepKind::kAbsent, -1, py::str("forward"), none, "forward");
    guard.add_step(StepKind::kLength, -1, none, 1, none, "size");
    const char* const changes[] = {"d['child'] = []",     "d.update(child=[])", "d.update({'forward': 1})",
                                   "d.clear()",           "d.pop('child')",     "d.setdefault('forward', 1)",
                                   "d.__ior__({'a': 1})", "del d['child']",     "d.popitem()",
                                   "d['forward'] = None"};
    for (const char* const change : changes) {
        root.attr("clear")();
        root["child"] = child;
        ASSERT_EQ(check(root), "") << change;
        ASSERT_EQ(check(root), "") << change;
        py::exec(change, py::dict("d"_a = root));
        EXPECT_NE(check(root), "") << change;
    }
}

TEST_F(CallableGuardTest, ADictAtTheAddressOfADeadOneIsNotTakenForIt) {
    const py::list child;
    py::object holder = py::eval("type('Holder', (), {})()");
    holder.attr("table") = py::dict("child"_a = child);
    const int attributes = step(StepKind::kInstanceDict, -1, none, none, "attributes");
    const int table = step(StepKind::kItem, attributes, py::str("table"), none, "table");
    step(StepKind::kItem, table, py::str("child"), child, "child");
    EXPECT_EQ(check(holder), "");
    const PyObject* const address = py::object(holder.attr("table")).ptr();
    holder.attr("table") = none;
    std::vector<py::dict> others;
    do {
        others.push_back(py::dict("child"_a = py::list()));
    } while (others.back().ptr() != address && others.size() < 10000);
    ASSERT_EQ(others.back().ptr(), address);
    holder.attr("table") = others.back();
    EXPECT_EQ(check(holder), "child was replaced by another object");
}

TEST_F(CallableGuardTest, ListsCellsAndInstancesThatChangeWhileNoDictDoesAreNoticed) {
    const py::list child;
    py::list list;
    list.append(child);
    const py::object cell = py::module_::import("types").attr("CellType")(child);
    py::object holder = py::eval("type('Holder', (), {})()");
    holder.attr("child") = child;
    const py::dict root("list"_a = list, "cell"_a = cell, "holder"_a = holder);
    position(step(StepKind::kItem, -1, py::str("list"), none, "list"), 0, child, "list[0]");
    step(StepKind::kCell, step(StepKind::kItem, -1, py::str("cell"), cell, "cell"), none, child, "contents");
    const int attributes = step(StepKind::kInstanceDict, step(StepKind::kItem, -1, py::str("holder"), holder, "holder"),
                                none, none, "attributes");
    step(StepKind::kItem, attributes, py::str("child"), child, "child");
    for (int repeat = 0; repeat < 2; ++repeat) EXPECT_EQ(check(root), "");
    list[0] = none;
    EXPECT_EQ(check(root), "list[0] was replaced by another object");
    list[0] = child;
    EXPECT_EQ(check(root), "");
    cell.attr("cell_contents") = none;
    EXPECT_EQ(check(root), "contents was replaced by another object");
    cell.attr("cell_contents") = child;
    EXPECT_EQ(check(root), "");
    holder.attr("__dict__") = py::dict("child"_a = none);
    EXPECT_EQ(check(root), "child was replaced by another object");
    holder.attr("__dict__") = py::dict("child"_a = child);
    EXPECT_EQ(check(root), "");
}

}  // namespace
}  // namespace te_graph::graphs
