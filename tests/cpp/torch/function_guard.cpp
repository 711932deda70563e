// FunctionGuard: values, lengths, keys, gradients; other objects that hold the same; nothing is kept.
#include <ATen/ops/ones.h>
#include <pybind11/eval.h>

#include "guard_test.h"

namespace te_graph::graphs {
namespace {

class FunctionGuardTest : public GuardTest<FunctionGuard> {
protected:
    int item(int parent, const py::object& key, std::string subject, bool is_ephemeral = false) {
        return guard.add_step(StepKind::kItem, parent, key, 0, none, std::move(subject), is_ephemeral);
    }
    std::string pass(const py::object& root) {
        const std::string change = guard.check(root.ptr());
        EXPECT_EQ(PyErr_Occurred(), nullptr);
        return change;
    }
    void expect(const py::object& root, const std::string& change) {
        for (int repeat = 0; repeat < 2; ++repeat) EXPECT_EQ(pass(root), change);
    }
    static py::object value_of(const char* code) { return py::eval(code); }
};

TEST_F(FunctionGuardTest, ValuesAreComparedByTypeAndValue) {
    py::list root;
    root.append(2.0);
    guard.expect_value(position(-1, 0, none, "lr"), snapshot(py::float_(2.0)));
    expect(root, "");
    root[0] = value_of("float('2')");
    expect(root, "");
    root[0] = 2;
    expect(root, "lr changed from 2.0 to 2");
    root[0] = value_of("float('nan')");
    expect(root, "lr changed from 2.0 to nan");
    root[0] = py::cast(at::ones({2}));
    expect(root, "lr changed from 2.0 to a tensor");
    root[0] = 2.0;
    expect(root, "");
}

TEST_F(FunctionGuardTest, NanEqualsItselfAndZeroHasASign) {
    py::list root;
    root.append(value_of("float('nan')"));
    root.append(0.0);
    guard.expect_value(position(-1, 0, none, "a"), snapshot(value_of("float('nan')")));
    guard.expect_value(position(-1, 1, none, "b"), snapshot(py::float_(0.0)));
    expect(root, "");
    root[1] = -0.0;
    expect(root, "b changed from 0.0 to -0.0");
}

TEST_F(FunctionGuardTest, LengthsAndKeysInOrder) {
    py::list list(3);
    py::dict dict("x"_a = 1, "y"_a = 2);
    const py::list root(py::make_tuple(list, dict));
    const int first = position(-1, 0, none, "list"), second = position(-1, 1, none, "dict");
    guard.add_step(StepKind::kLength, first, none, 3, none, "length of list");
    guard.add_step(StepKind::kKeys, second, py::make_tuple("x", "y"), 0, none, "keys of dict");
    expect(root, "");
    list.append(1);
    expect(root, "length of list changed");
    list.attr("pop")();
    dict["x"] = 5;
    expect(root, "");
    const py::object x = dict.attr("pop")("x");
    expect(root, "keys of dict changed");
    dict["x"] = x;  // now after y
    expect(root, "keys of dict changed");
}

TEST_F(FunctionGuardTest, OtherTensorsOfTheSameFactsWillDo) {
    const at::Tensor tensor = at::ones({2}), form = at::ones({3});
    guard.add_tensor(position(-1, 0, none, "used"), tensor);
    guard.add_tensor(position(-1, 1, none, "form"), form, /*is_used=*/false);
    expect(py::make_tuple(tensor, form), "");
    expect(py::make_tuple(tensor.alias(), at::ones({3})), "");
    expect(py::make_tuple(tensor.clone(), form), "used moved to other memory");
    expect(py::make_tuple(tensor, at::ones({4})), "form changed shape from [3] to [4]");
    expect(py::make_tuple(tensor, at::ones({6}).slice(0, 0, 6, 2)), "form changed strides from [1] to [2]");
    expect(py::make_tuple(tensor, at::ones({3}).requires_grad_()), "form changed requires_grad from False");
}

TEST_F(FunctionGuardTest, HooksOnGradientsComeAndGo) {
    const at::Tensor leaf = at::ones({2}).requires_grad_();
    const py::tuple root = py::make_tuple(leaf);
    guard.add_tensor(position(-1, 0, none, "leaf"), leaf, true, false, /*compares_hooks=*/true);
    expect(root, "");
    const unsigned hook = leaf.register_hook([](const at::Tensor&) {});
    expect(root, "leaf has gradient hooks now");
    leaf.remove_hook(hook);
}

TEST_F(FunctionGuardTest, ClassesKeepTheirVersion) {
    py::dict replay_order;
    py::exec("class Base: pass\nclass Below(Base): pass", replay_order);
    const py::object below = replay_order["Below"];
    const auto version = type_version(reinterpret_cast<PyTypeObject*>(below.ptr()));
    guard.add_step(StepKind::kTypeVersion, position(-1, 0, none, "type"), none, version, none, "class Below");
    const py::tuple root = py::make_tuple(below);
    expect(root, "");
    replay_order["Base"].attr("k") = 1;
    expect(root, "class Below changed");
}

TEST_F(FunctionGuardTest, SlotsThatAreEmptyStaySo) {
    py::dict replay_order;
    py::exec("class Slotted: __slots__ = ('k',)\nobject = Slotted()", replay_order);
    const py::object object = replay_order["object"];
    guard.add_step(StepKind::kNoAttribute, position(-1, 0, none, "object"), py::str("k"), 0, none, "object.k");
    const py::tuple root = py::make_tuple(object);
    expect(root, "");
    object.attr("k") = 1;
    expect(root, "object.k changed");
}

TEST_F(FunctionGuardTest, NothingIsKept) {
    py::object root = py::make_tuple(at::ones({2}));
    guard.add_tensor(position(-1, 0, none, "tensor"), root[py::int_(0)].cast<at::Tensor>());
    expect(root, "");
    const py::weakref watched(root[py::int_(0)]);
    root = none;
    EXPECT_TRUE(watched().is_none());
}

TEST_F(FunctionGuardTest, GradientsComeAndGo) {
    at::Tensor with = at::ones({2}).requires_grad_(), without = at::ones({2}).requires_grad_();
    const at::Tensor gradient = at::ones({2});
    with.mutable_grad() = gradient;
    const py::tuple root = py::make_tuple(with, without);
    const auto grad_below = [&](int parent, const char* name) {
        return guard.add_step(StepKind::kGrad, parent, none, 0, none, name);
    };
    const int there = grad_below(position(-1, 0, none, "with"), "grad of with");
    guard.add_tensor(there, gradient, true, /*is_written=*/true);
    guard.expect_value(grad_below(position(-1, 1, none, "without"), "grad of without"), snapshot(none));
    expect(root, "");
    const auto version = with.grad()._version();
    std::vector<py::object> reached;
    EXPECT_EQ(guard.begin(root.ptr(), {}, reached), "");
    EXPECT_EQ(with.grad()._version(), version + 1);
    without.mutable_grad() = gradient.clone();
    expect(root, "grad of without changed from None to a tensor");
    without.mutable_grad() = at::Tensor();
    with.mutable_grad() = gradient.detach();
    expect(root, "");
    with.mutable_grad() = gradient.clone();
    expect(root, "grad of with moved to other memory");
    with.mutable_grad() = at::Tensor();
    expect(root, "grad of with is no longer a tensor");
}

TEST_F(FunctionGuardTest, ItemsOfObjectsFollowTheirKeys) {
    py::dict replay_order;
    py::exec("class Key:\n    pass\n", replay_order);
    const py::object first = replay_order["Key"](), second = replay_order["Key"]();
    py::dict table;
    table[first] = 1.0;
    table[second] = 2.0;
    py::list root(py::make_tuple(table, first));
    const int dict = position(-1, 0, none, "table"), key = position(-1, 1, none, "key");
    const int found = guard.add_step(StepKind::kItemOf, dict, none, key, none, "table[key]");
    guard.expect_value(found, snapshot(py::float_(1.0)));
    expect(root, "");
    root[1] = second;  // no dictionary has changed
    expect(root, "table[key] changed from 1.0 to 2.0");
    root[1] = first;
    expect(root, "");
    table[first] = 3.0;
    expect(root, "table[key] changed from 1.0 to 3.0");
}

TEST_F(FunctionGuardTest, WhatIsMetTwiceMustBeOneObject) {
    const py::list one, other;
    const int first = position(-1, 0, none, "first"), second = position(-1, 1, none, "second");
    guard.expect_same(second, first);
    expect(py::make_tuple(one, one), "");
    expect(py::make_tuple(other, other), "");
    expect(py::make_tuple(one, other), "second was replaced by another object");
}

TEST_F(FunctionGuardTest, AnotherDictInTheSamePlaceIsLookedInto) {
    py::list root;
    root.append(py::dict("x"_a = 1));
    for (const bool is_ephemeral : {false, true}) {
        const int dict = position(-1, 0, none, "dict");
        guard.expect_value(item(dict, py::str("x"), "x", is_ephemeral), snapshot(py::int_(1)));
    }
    expect(root, "");
    root[0] = py::dict("x"_a = 1);
    expect(root, "");
    root[0] = py::dict("x"_a = 2);
    expect(root, "x changed from 1 to 2");
    for (int repeat = 0; repeat < 100; ++repeat) {
        root[0] = py::dict("x"_a = repeat);  // often where the last one lay
        EXPECT_EQ(pass(root).empty(), repeat == 1);
    }
}

}  // namespace
}  // namespace te_graph::graphs
