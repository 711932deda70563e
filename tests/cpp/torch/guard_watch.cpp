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

// Steps that are not taken again while the parent is the same, for nothing else could lead elsewhere.
TEST_F(CallableGuardTest, FunctionsMethodsAndModulesThatChangeWhileNoDictDoesAreNoticed) {
    py::dict scope;
    py::exec(R"(
import types
class Owner:
    def method(self): pass
def make(cell):
    def function(x=1, *, y=2): return cell
    return function
function, other = make(1), make(1)
module = types.ModuleType("module")
module.held = 1
)",
             scope);
    const py::object function = scope["function"];
    const py::dict root("function"_a = function, "pair"_a = py::make_tuple(1, function), "module"_a = scope["module"],
                        "method"_a = scope["Owner"]().attr("method"), "owner"_a = scope["Owner"]);
    const auto item = [&](const char* name) { return step(StepKind::kItem, -1, py::str(name), none, name); };
    const auto attribute = [&](int parent, const char* name) {
        const py::object key = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
        return step(StepKind::kAttribute, parent, key, none, name);
    };
    const int at_function = item("function"), at_method = item("method");
    guard.expect_identity(attribute(at_function, "__code__"), function.attr("__code__"));
    guard.expect_identity(attribute(at_function, "__defaults__"), function.attr("__defaults__"));
    guard.expect_identity(attribute(at_function, "__kwdefaults__"), function.attr("__kwdefaults__"));
    guard.expect_identity(position(attribute(at_function, "__closure__"), 0, none, "cell"),
                          function.attr("__closure__")[py::int_(0)]);
    guard.expect_value(attribute(at_function, "__name__"), snapshot(function.attr("__name__")));
    guard.expect_value(attribute(item("owner"), "__name__"), snapshot(scope["Owner"].attr("__name__")));
    guard.expect_same(position(item("pair"), 1, none, "pair[1]"), at_function);
    guard.expect_identity(attribute(at_method, "__func__"), scope["Owner"].attr("method"));
    attribute(at_method, "__self__");
    const int members = step(StepKind::kInstanceDict, item("module"), none, none, "members");
    guard.expect_value(step(StepKind::kItem, members, py::str("held"), none, "held"), snapshot(py::int_(1)));

    py::exec("Owner.other = lambda self: None", scope);
    scope["root"] = root;
    const std::pair<std::string, std::string> changes[] = {{"function.__defaults__", "(2,)"},
                                                           {"function.__kwdefaults__", "{'y': 3}"},
                                                           {"function.__name__", "'another'"},
                                                           {"Owner.__name__", "'Another'"},
                                                           {"root['pair']", "(1, other)"},
                                                           {"root['method']", "Owner().other"},
                                                           {"module.held", "2"}};
    for (const auto& [place, value] : changes) {
        for (int repeat = 0; repeat < 2; ++repeat) ASSERT_EQ(check(root), "") << place;
        py::exec("before = " + place + "\n" + place + " = " + value, scope);
        EXPECT_NE(check(root), "") << place;
        py::exec(place + " = before", scope);
    }
    EXPECT_EQ(check(root), "");
    py::exec(
        "def replacement(cell):\n    def function(x=1, *, y=2): return cell, 1\n    return function\n"
        "function.__code__ = replacement(1).__code__",
        scope);
    EXPECT_EQ(check(root), "__code__ was replaced by another object");
}

TEST_F(CallableGuardTest, OrdersOfOrderedDictionariesThatChangeAreNoticed) {
    const py::object ordered = py::module_::import("collections").attr("OrderedDict")();
    const py::dict root("table"_a = ordered);
    for (const int size : {0, 1, 2}) {
        if (size > 0) ordered[py::int_(size)] = size;
        SCOPED_TRACE(size);
        CallableGuard one;
        const int parent = one.add_step(StepKind::kItem, -1, py::str("table"), 0, ordered, "table");
        one.expect_value(one.add_step(StepKind::kContents, parent, none, 0, none, "contents"), snapshot(ordered));
        CallableGuard::Tensors tensors;
        for (int repeat = 0; repeat < 2; ++repeat) EXPECT_EQ(one.check(root.ptr(), tensors), "");
        if (size == 2) {
            ordered.attr("move_to_end")(1);
            EXPECT_NE(one.check(root.ptr(), tensors), "");
            ordered.attr("move_to_end")(2);
            EXPECT_EQ(one.check(root.ptr(), tensors), "");
        }
        ordered["more"] = 1;
        EXPECT_NE(one.check(root.ptr(), tensors), "");
        ordered.attr("pop")("more");
        EXPECT_EQ(one.check(root.ptr(), tensors), "");
    }
}

// Containers without weak references, and functions, that nobody else holds: the next of a kind stands at their
// address.
TEST_F(CallableGuardTest, WhatStandsAtTheAddressOfADeadOneIsNotTakenForIt) {
    py::dict scope;
    py::exec(R"(
class Slots:
    __slots__ = ("held",)
def function_of(value):
    return lambda x=value: x
def replace(items, make, value):
    before = id(items[0])
    items[0] = None
    items[0] = make(value)
    return id(items[0]) == before
)",
             scope);
    const char* const makers[] = {"lambda value: (value, 0)", "function_of"};
    for (const char* const maker : makers) {
        SCOPED_TRACE(maker);
        const py::object make = py::eval(maker, scope);
        py::list items;
        items.append(make(1000));
        CallableGuard one;
        const int at = one.add_step(StepKind::kPosition, -1, none, 0, none, "items[0]");
        const bool is_tuple = py::isinstance<py::tuple>(py::object(items[0]));
        const int inside = is_tuple ? at : one.add_step(StepKind::kAttribute, at, py::str("__defaults__"), 0, none, "");
        one.expect_value(one.add_step(StepKind::kPosition, inside, none, 0, none, "value"), snapshot(py::int_(1000)));
        CallableGuard::Tensors tensors;
        for (int repeat = 0; repeat < 2; ++repeat) ASSERT_EQ(one.check(items.ptr(), tensors), "");
        bool is_recycled = false;
        for (int attempt = 0; attempt < 100 && !is_recycled; ++attempt) {
            is_recycled = scope["replace"](items, make, 1001).cast<bool>();
            EXPECT_EQ(one.check(items.ptr(), tensors), "value changed from 1000 to 1001");
            items[0] = make(1000);
            for (int repeat = 0; repeat < 2; ++repeat) ASSERT_EQ(one.check(items.ptr(), tensors), "");
        }
        EXPECT_TRUE(is_recycled);
    }
}

}  // namespace
}  // namespace te_graph::graphs
