// CallableGuard: each kind of step reached, replaced and gone; each fact of a tensor; messages that name the subject.
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/rand.h>
#include <gmock/gmock.h>
#include <pybind11/eval.h>

#include <memory>

#include "guard_test.h"

namespace te_graph::graphs {
namespace {

TEST_F(CallableGuardTest, WithoutStepsFindsNothingChanged) { EXPECT_EQ(check(none), ""); }

TEST_F(CallableGuardTest, InstanceDictIsReachedReplacedAndGone) {
    const py::object root = namespace_of(py::dict("a"_a = 1));
    step(StepKind::kInstanceDict, -1, none, root.attr("__dict__"), "attributes of fc1");
    EXPECT_EQ(check(root), "");
    root.attr("a") = 2;
    EXPECT_EQ(check(root), "");
    const py::object holder = py::eval("type('Holder', (), {})()");
    EXPECT_EQ(check(holder), "attributes of fc1 was replaced by another object");
    EXPECT_EQ(check(py::int_(3)), "attributes of fc1 is gone");
}

TEST_F(CallableGuardTest, AReplacedInstanceDictIsNoticed) {
    const py::object root = py::eval("type('Holder', (), {})()");
    const py::object attributes = root.attr("__dict__");
    step(StepKind::kInstanceDict, -1, none, attributes, "attributes of fc1");
    EXPECT_EQ(check(root), "");
    root.attr("__dict__") = py::dict();
    EXPECT_EQ(check(root), "attributes of fc1 was replaced by another object");
}

TEST_F(CallableGuardTest, ItemIsReachedReplacedAndGone) {
    const py::list bias;
    py::dict root("bias"_a = bias);
    step(StepKind::kItem, -1, py::str("bias"), bias, "bias of fc1");
    EXPECT_EQ(check(root), "");
    root["bias"] = py::list();  // equal, but another object
    EXPECT_EQ(check(root), "bias of fc1 was replaced by another object");
    root.attr("clear")();
    EXPECT_EQ(check(root), "bias of fc1 is gone");
    EXPECT_EQ(check(py::list()), "bias of fc1 is gone");
}

TEST_F(CallableGuardTest, ItemWithAKeyThatCannotBeHashedIsGoneAndLeavesNoPythonError) {
    step(StepKind::kItem, -1, py::list(), none, "bias of fc1");
    EXPECT_EQ(check(py::dict()), "bias of fc1 is gone");
}

TEST_F(CallableGuardTest, AChangedFlagIsNamedWithItsValue) {
    py::dict root("training"_a = true, "frozen"_a = false);
    step(StepKind::kItem, -1, py::str("training"), py::bool_(true), "training of fc1");
    step(StepKind::kItem, -1, py::str("frozen"), py::bool_(false), "frozen of fc1");
    EXPECT_EQ(check(root), "");
    root["frozen"] = true;
    EXPECT_EQ(check(root), "frozen of fc1 is now True");
    root["training"] = false;
    EXPECT_EQ(check(root), "training of fc1 is now False");
}

TEST_F(CallableGuardTest, LengthIsThatOfADictOrListAndChangesBothWays) {
    py::dict root("a"_a = 1, "b"_a = 2);
    guard.add_step(StepKind::kLength, -1, none, 2, none, "hooks of fc1");
    EXPECT_EQ(check(root), "");
    root["c"] = 3;
    EXPECT_EQ(check(root), "hooks of fc1 changed");
    root.attr("clear")();
    EXPECT_EQ(check(root), "hooks of fc1 changed");
    EXPECT_EQ(check(py::set(py::make_tuple(1, 2))), "");
    EXPECT_EQ(check(py::int_(2)), "hooks of fc1 changed");
}

TEST_F(CallableGuardTest, AbsentHoldsUntilTheKeyAppearsAndLeadsToTheDictItself) {
    const py::list item;
    py::dict root("a"_a = item);
    const int absent = step(StepKind::kAbsent, -1, py::str("forward"), none, "forward of fc1");
    step(StepKind::kItem, absent, py::str("a"), item, "a");
    EXPECT_EQ(check(root), "");
    root["forward"] = py::none();
    EXPECT_EQ(check(root), "forward of fc1 changed");
    EXPECT_EQ(check(py::list()), "forward of fc1 changed");
}

TEST_F(CallableGuardTest, LengthLeadsToTheDictItself) {
    const py::list item;
    const py::dict root("a"_a = item);
    const int length = guard.add_step(StepKind::kLength, -1, none, 1, none, "modules");
    step(StepKind::kItem, length, py::str("a"), item, "a");
    EXPECT_EQ(check(root), "");
}

TEST_F(CallableGuardTest, PositionOfAListIsReachedReplacedAndGone) {
    const py::list first, second;
    py::list root;
    root.append(first);
    root.append(second);
    position(-1, 1, second, "layers[1]");
    EXPECT_EQ(check(root), "");
    root[1] = first;
    EXPECT_EQ(check(root), "layers[1] was replaced by another object");
    root.attr("pop")();
    EXPECT_EQ(check(root), "layers[1] is gone");
    EXPECT_EQ(check(py::dict()), "layers[1] is gone");
}

TEST_F(CallableGuardTest, PositionOfATupleIsReachedReplacedAndGone) {
    const py::list first, second;
    position(-1, 1, second, "args[1]");
    EXPECT_EQ(check(py::make_tuple(first, second)), "");
    EXPECT_EQ(check(py::make_tuple(second, first)), "args[1] was replaced by another object");
    EXPECT_EQ(check(py::make_tuple(second)), "args[1] is gone");
}

TEST_F(CallableGuardTest, CellIsReachedReplacedAndGone) {
    const py::object cell = py::module_::import("types").attr("CellType")(py::list());
    step(StepKind::kCell, -1, none, cell.attr("cell_contents"), "closure variable scale");
    EXPECT_EQ(check(cell), "");
    cell.attr("cell_contents") = py::list();
    EXPECT_EQ(check(cell), "closure variable scale was replaced by another object");
    py::delattr(cell, "cell_contents");
    EXPECT_EQ(check(cell), "closure variable scale is gone");
    EXPECT_EQ(check(py::list()), "closure variable scale is gone");
}

TEST_F(CallableGuardTest, AKnownObjectIsTakenFromWhereverItIsUntilItIsGone) {
    py::object type = py::eval("type('Holder', (), {'scale': 2.0})");
    const int known = step(StepKind::kKnown, -1, none, type, "Holder");
    guard.expect_value(step(StepKind::kAttribute, known, py::str("scale"), none, "Holder.scale"),
                       snapshot(py::float_(2.0)));
    EXPECT_EQ(check(none), "");
    type.attr("scale") = 3.0;
    EXPECT_EQ(check(none), "Holder.scale changed from 2.0 to 3.0");
    type.attr("scale") = 2.0;
    EXPECT_EQ(check(none), "");
    type = none;
    py::module_::import("gc").attr("collect")();
    EXPECT_EQ(check(none), "Holder is gone");
}

TEST_F(CallableGuardTest, ContentsAreComparedMemberByMember) {
    const py::dict members;
    const char* const containers[] = {"[1, (0.0, 'a')]", "{'a': 1, 'b': 2}", "{1, 2}"};
    const char* const changes[] = {"c[0] = 2",           "c[0] = True",   "c.append(1)",   "c.pop()",
                                   "c[1] = (-0.0, 'a')", "c.update(a=2)", "c.update(b=1)", "c['a'] = c.pop('a')",
                                   "c.clear()",          "c.add(3)",      "c.discard(1)"};
    int seen = 0;
    for (const char* const container : containers) {
        for (const char* const change : changes) {
            CallableGuard one;
            const py::object held = py::eval(container);
            const py::list root(py::make_tuple(held));
            const int place = one.add_step(StepKind::kPosition, -1, none, 0, none, "sizes");
            one.expect_value(one.add_step(StepKind::kContents, place, none, 0, none, "sizes"),
                             snapshot(py::eval(container)));
            CallableGuard::Tensors tensors;
            for (int count = 0; count < 2; ++count) ASSERT_EQ(one.check(root.ptr(), tensors), "");
            try {
                py::exec(change, py::dict("c"_a = held));
            } catch (const py::error_already_set&) {
                continue;  // of another type of container
            }
            EXPECT_THAT(one.check(root.ptr(), tensors),
                        testing::AllOf(testing::HasSubstr("sizes"), testing::HasSubstr("changed")))
                << change;
            ++seen;
        }
    }
    EXPECT_EQ(seen, 17);
}

TEST_F(CallableGuardTest, AttributeIsReachedReplacedAndGone) {
    const py::object partial = py::module_::import("functools").attr("partial");
    const py::object function = py::eval("lambda: None"), other = py::eval("lambda: None");
    step(StepKind::kAttribute, -1, py::str("func"), function, "function of the partial");
    EXPECT_EQ(check(partial(function)), "");
    EXPECT_EQ(check(partial(other)), "function of the partial was replaced by another object");
    EXPECT_EQ(check(py::list()), "function of the partial is gone");
}

TEST_F(CallableGuardTest, AStepWithoutAnExpectedObjectTakesAny) {
    py::dict root("a"_a = 1000);
    step(StepKind::kItem, -1, py::str("a"), none, "a");
    root["a"] = 2000;
    EXPECT_EQ(check(root), "");
    root.attr("clear")();
    EXPECT_EQ(check(root), "a is gone");
}

TEST_F(CallableGuardTest, WalksThroughAllKindsAndNamesTheFirstStepThatChanged) {
    const at::Tensor weight = at::rand({2, 2}), scale = at::rand({1});
    const py::object cell = py::module_::import("types").attr("CellType")(py::cast(scale));
    py::dict parameters("weight"_a = weight);
    const py::object child = namespace_of(py::dict("parameters"_a = parameters));
    py::list layers;
    layers.append(child);
    const py::object root = namespace_of(py::dict("layers"_a = layers, "closure"_a = py::make_tuple(cell)));

    const int attributes = step(StepKind::kInstanceDict, -1, none, none, "attributes");
    const int closure = step(StepKind::kItem, attributes, py::str("closure"), none, "closure");
    const int contents = step(StepKind::kCell, position(closure, 0, cell, "cell"), none, none, "scale");
    const int list = step(StepKind::kAttribute, -1, py::str("layers"), layers, "layers");
    const int layer = position(list, 0, child, "layers.0");
    const int layer_dict = step(StepKind::kInstanceDict, layer, none, none, "attributes of layers.0");
    const int names = step(StepKind::kItem, layer_dict, py::str("parameters"), parameters, "parameters of layers.0");
    const int item = step(StepKind::kItem, names, py::str("weight"), py::cast(weight), "weight of layers.0");
    EXPECT_EQ(guard.add_tensor(item, weight), 0);
    EXPECT_EQ(guard.add_tensor(contents, scale), 1);
    ASSERT_EQ(guard.tensors(), 2u);
    EXPECT_EQ(guard.tensor_name(0), "weight of layers.0");
    EXPECT_EQ(guard.tensor_name(1), "scale");

    EXPECT_EQ(check(root), "");
    ASSERT_EQ(found.size(), 2u);
    EXPECT_TRUE(found[0].is_same(weight));
    EXPECT_TRUE(found[1].is_same(scale));

    parameters["weight"] = weight.clone();
    EXPECT_EQ(check(root), "weight of layers.0 moved to other memory");
    layers[0] = namespace_of(py::dict("parameters"_a = parameters));
    EXPECT_EQ(check(root), "layers.0 was replaced by another object");
    cell.attr("cell_contents") = scale.clone();
    EXPECT_EQ(check(root), "scale moved to other memory");
}

TEST_F(CallableGuardTest, KeepsNothingAliveThatItExpects) {
    const py::object type = py::eval("type('Module', (), {})");
    py::object module = type();
    const py::object root = namespace_of(py::dict("child"_a = module));
    const py::object watch = py::module_::import("weakref").attr("ref")(module);
    step(StepKind::kItem, step(StepKind::kInstanceDict, -1, none, none, "attributes"), py::str("child"), module,
         "child");
    EXPECT_EQ(check(root), "");
    py::delattr(root, "child");
    module = py::none();
    EXPECT_TRUE(watch().is_none());
    EXPECT_EQ(check(root), "child is gone");
}

TEST_F(CallableGuardTest, CheckLeavesReferenceCountsAsTheyWere) {
    const py::object child = py::eval("type('Module', (), {})()");
    const py::object root = namespace_of(py::dict("child"_a = child));
    const py::object attributes = root.attr("__dict__");
    const int dict = step(StepKind::kInstanceDict, -1, none, attributes, "attributes");
    step(StepKind::kItem, dict, py::str("child"), child, "child");
    step(StepKind::kAttribute, -1, py::str("child"), child, "child");
    const Py_ssize_t counts[] = {root.ref_count(), attributes.ref_count(), child.ref_count()};
    for (int repeat = 0; repeat < 3; ++repeat) EXPECT_EQ(check(root), "");
    EXPECT_EQ(root.ref_count(), counts[0]);
    EXPECT_EQ(attributes.ref_count(), counts[1]);
    EXPECT_EQ(child.ref_count(), counts[2]);
}

TEST_F(CallableGuardTest, MayBeDroppedWithoutTheGilThoughItsKeysRunPythonCode) {
    const py::list dropped;
    auto dying = std::make_unique<CallableGuard>();
    const py::object type = py::eval("type('Key', (), {'__del__': lambda self: self.dropped.append(1)})");
    type.attr("dropped") = dropped;
    dying->add_step(StepKind::kItem, -1, type(), 0, none, "key");
    EXPECT_EQ(dropped.size(), 0u);
    {
        const py::gil_scoped_release without_gil;
        dying.reset();
    }
    EXPECT_EQ(dropped.size(), 1u);
}

TEST_F(CallableGuardTest, ANewObjectAtTheAddressOfADeadOneIsNotTakenForIt) {
    const py::object type = py::eval("type('Module', (), {})");
    py::object module = type();
    const PyObject* const address = module.ptr();
    py::dict root("child"_a = module);
    step(StepKind::kItem, -1, py::str("child"), module, "child");
    EXPECT_EQ(check(root), "");
    root["child"] = py::none();
    module = py::none();
    std::vector<py::object> others;
    do {
        others.push_back(type());
    } while (others.back().ptr() != address && others.size() < 10000);
    ASSERT_EQ(others.back().ptr(), address);
    root["child"] = others.back();
    EXPECT_EQ(check(root), "child was replaced by another object");
}

// A dict with one tensor, guarded.
class GuardedWeight : public CallableGuardTest {
protected:
    GuardedWeight() { guard.add_tensor(step(StepKind::kItem, -1, py::str("weight"), none, "weight of fc1"), weight); }

    // Gives the same Python object other contents, as `p.data = ...` does.
    std::string check_with(const at::Tensor& data) {
        weight.set_data(data);
        const std::string change = check(root);
        EXPECT_EQ(check_tensors({weight}), change);
        return change;
    }

    const at::Tensor weight = at::rand({4, 4});
    const at::Tensor original = weight.detach();
    py::dict root{"weight"_a = weight};
};

TEST_F(GuardedWeight, IsFoundUnchanged) {
    EXPECT_EQ(check(root), "");
    ASSERT_EQ(found.size(), 1u);
    EXPECT_TRUE(found[0].is_same(weight));
    EXPECT_EQ(check_tensors(found), "");
    weight.mul_(2);  // values may change
    EXPECT_EQ(check(root), "");
    EXPECT_EQ(check_with(original), "");
}

TEST_F(GuardedWeight, ThatMovedIsNamed) {
    EXPECT_EQ(check_with(original.clone()), "weight of fc1 moved to other memory");
}

TEST_F(GuardedWeight, OfAnotherShapeIsNamedWithBothShapes) {
    EXPECT_EQ(check_with(original.view({2, 8})), "weight of fc1 changed shape from [4, 4] to [2, 8]");
    EXPECT_EQ(check_with(original.select(0, 0)), "weight of fc1 changed shape from [4, 4] to [4]");
}

TEST_F(GuardedWeight, OfAnotherDtypeIsNamedWithBothDtypes) {
    EXPECT_EQ(check_with(original.view(at::kInt)), "weight of fc1 changed dtype from torch.float32 to torch.int32");
}

TEST_F(GuardedWeight, WithOtherStridesIsNamedWithBothStrides) {
    EXPECT_EQ(check_with(original.t()), "weight of fc1 changed strides from [4, 1] to [1, 4]");
}

TEST_F(GuardedWeight, ThatIsANegatedViewNowIsNamedAsSomethingElseThanRequiresGrad) {
    const std::string change = check_with(at::_neg_view(original));
    EXPECT_THAT(change, testing::StartsWith("weight of fc1 "));
    EXPECT_THAT(change, testing::Not(testing::HasSubstr("requires_grad")));
}

TEST_F(CallableGuardTest, AConjugatedViewThatIsTheSameAsBeforeIsFoundUnchanged) {
    const at::Tensor weight = at::rand({2}, at::kComplexFloat).conj();
    guard.add_tensor(step(StepKind::kItem, -1, py::str("weight"), none, "weight"), weight);
    EXPECT_EQ(check(py::dict("weight"_a = weight)), "");
}

TEST_F(GuardedWeight, WhoseStorageWasExchangedInPlaceIsNoticed) {
    const at::Tensor other = at::rand({4, 4});
    EXPECT_EQ(check(root), "");
    weight.unsafeGetTensorImpl()->set_storage_keep_dtype(other.storage());
    EXPECT_EQ(check(root), "weight of fc1 moved to other memory");
    EXPECT_EQ(check_tensors({weight}), "weight of fc1 moved to other memory");
}

TEST_F(CallableGuardTest, AWeightAtAnotherOffsetOfItsStorageHasMoved) {
    const at::Tensor flat = at::rand({20});
    guard.add_tensor(step(StepKind::kItem, -1, py::str("weight"), none, "weight of fc1"), flat.slice(0, 4, 20));
    EXPECT_EQ(check(py::dict("weight"_a = flat.slice(0, 4, 20))), "");
    EXPECT_EQ(check(py::dict("weight"_a = flat.slice(0, 0, 16))), "weight of fc1 moved to other memory");
}

TEST_F(GuardedWeight, ThatRequiresGradNowIsNamedByCheckAndOfNoImportanceToCheckTensors) {
    weight.set_requires_grad(true);
    EXPECT_EQ(check(root), "weight of fc1 changed requires_grad from False");
    EXPECT_EQ(check_tensors({weight}), "");
}

TEST_F(CallableGuardTest, AWeightThatIsFrozenNowIsNamedByCheckAndOfNoImportanceToCheckTensors) {
    const at::Tensor weight = at::rand({2}).requires_grad_();
    guard.add_tensor(step(StepKind::kItem, -1, py::str("weight"), none, "weight of fc1"), weight);
    const py::dict root("weight"_a = weight);
    EXPECT_EQ(check(root), "");
    weight.set_requires_grad(false);
    EXPECT_EQ(check(root), "weight of fc1 changed requires_grad from True");
    EXPECT_EQ(check_tensors({weight}), "");
}

TEST_F(GuardedWeight, ThatIsNoTensorAnyMoreIsNamed) {
    root["weight"] = py::none();
    EXPECT_EQ(check(root), "weight of fc1 is no longer a tensor");
}

TEST_F(GuardedWeight, ReplacedByATensorOverTheSameMemoryIsNamedWhenTheObjectIsExpected) {
    root["weight"] = original;
    EXPECT_EQ(check(root), "");
    root["weight"] = weight;
    step(StepKind::kItem, -1, py::str("weight"), root["weight"], "parameter weight of fc1");
    EXPECT_EQ(check(root), "");
    root["weight"] = original;
    EXPECT_EQ(check(root), "parameter weight of fc1 was replaced by another object");
}

TEST_F(CallableGuardTest, CheckTensorsNamesTheOneOfSeveralThatMoved) {
    const std::vector<at::Tensor> tensors{at::rand({2}), at::rand({3}), at::rand({0})};
    py::list root;
    for (const at::Tensor& tensor : tensors) root.append(tensor);
    for (int i = 0; i < 3; ++i) guard.add_tensor(position(-1, i, none, "buffer " + std::to_string(i)), tensors[i]);
    EXPECT_EQ(check(root), "");
    EXPECT_EQ(check_tensors(found), "");
    found[1].set_data(at::rand({3}));
    EXPECT_EQ(check_tensors(found), "buffer 1 moved to other memory");
}

}  // namespace
}  // namespace te_graph::graphs
