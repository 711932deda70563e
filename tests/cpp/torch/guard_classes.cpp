// CallableGuard and code: what a class has for its instances, whichever class a user takes it for, and the code of
// functions.
#include <gmock/gmock.h>
#include <pybind11/eval.h>

#include "guard_test.h"

namespace te_graph::graphs {
namespace {

using testing::HasSubstr;

// Python code run in a scope of its own, which it is read from and changed in later.
class Program {
public:
    explicit Program(const char* text) { run(text); }
    void run(const char* text) { py::exec(text, replay_order_); }
    py::object operator[](const char* name) const { return replay_order_[name]; }

private:
    py::dict replay_order_;
};

class ClassTest : public CallableGuardTest {
protected:
    Program program{R"(
class Below:
    gain = 2.0
    def scale(self): pass
class Owner(Below):
    pass
owner = Owner()
)"};
    // The class of the root, and in it `name` by identity, or by value if that is a constant.
    void expect_member(const char* name) {
        const int kind = step(StepKind::kClass, -1, none, none, "class of owner");
        const int at = step(StepKind::kMember, kind, py::str(name), none, std::string(name) + " of class Owner");
        const py::object found =
            py::getattr(program["Owner"], name, py::module_::import("builtins").attr("NotImplemented"));
        if (auto value = snapshot(found)) {
            guard.expect_value(at, std::move(value));
        } else {
            guard.expect_identity(at, found);
        }
    }
};

TEST_F(ClassTest, AMemberIsFoundOfTheClassItselfOrABase) {
    expect_member("scale");
    EXPECT_EQ(check(program["owner"]), "");
    program.run("Below.scale = lambda self: None");
    EXPECT_EQ(check(program["owner"]), "scale of class Owner was replaced by another object");
    EXPECT_EQ(check(program["owner"]), "scale of class Owner was replaced by another object");
}

TEST_F(ClassTest, AMemberThatAppearsInFrontOfAnotherIsSeen) {
    expect_member("gain");
    for (int repeat = 0; repeat < 3; ++repeat) EXPECT_EQ(check(program["owner"]), "");
    program.run("Owner.gain = 3.0");
    EXPECT_EQ(check(program["owner"]), "gain of class Owner changed from 2.0 to 3.0");
    program.run("del Owner.gain");
    EXPECT_EQ(check(program["owner"]), "");
    program.run("del Below.gain");
    EXPECT_THAT(check(program["owner"]), HasSubstr("gain of class Owner changed from 2.0"));
}

TEST_F(ClassTest, AMemberThatIsNotThereMustStayAbsent) {
    expect_member("shift");
    EXPECT_EQ(check(program["owner"]), "");
    program.run("Owner.other = 1");
    EXPECT_EQ(check(program["owner"]), "");
    program.run("Below.shift = 1");
    EXPECT_THAT(check(program["owner"]), HasSubstr("shift of class Owner changed from NotImplemented"));
}

TEST_F(ClassTest, AnInstanceMayGetAnotherClassThatHasTheSame) {
    expect_member("scale");
    EXPECT_EQ(check(program["owner"]), "");
    program.run("class Same(Owner): pass\nowner.__class__ = Same");
    EXPECT_EQ(check(program["owner"]), "");
    program.run("class Another(Owner):\n    def scale(self): return 1\nowner.__class__ = Another");
    EXPECT_EQ(check(program["owner"]), "scale of class Owner was replaced by another object");
    program.run("owner.__class__ = Owner");
    EXPECT_EQ(check(program["owner"]), "");
}

TEST_F(ClassTest, AClassAsRootIsItself) {
    const int kind = step(StepKind::kClass, -1, none, none, "class of Owner");
    guard.expect_identity(kind, program["Owner"]);
    EXPECT_EQ(check(program["Owner"]), "");
    EXPECT_EQ(check(program["owner"]), "");
    EXPECT_EQ(check(program["Below"]), "class of Owner was replaced by another object");
}

TEST_F(ClassTest, TheClassBelowOneOfOursIsWhatAUserKnows) {
    program.run("class Graphed(Owner): _te_graph_base = Owner\nowner.__class__ = Graphed");
    const int kind = step(StepKind::kClass, -1, none, none, "class of owner");
    guard.expect_identity(kind, program["Owner"]);
    EXPECT_EQ(check(program["owner"]), "");
    program.run("class Further(Graphed): pass\nowner.__class__ = Further");  // which has not made that itself
    EXPECT_EQ(check(program["owner"]), "class of owner was replaced by another object");
    program.run("owner.__class__ = Owner");
    EXPECT_EQ(check(program["owner"]), "");
}

TEST_F(ClassTest, ClassesThatDoNotChangeAreNotLookedIntoAgain) {
    // What the class has is found by Python's own look-up, which a key of another class of strings can count.
    program.run(R"(
class Key(str):
    lookups = 0
    def __hash__(self):
        Key.lookups += 1
        return str.__hash__(self)
key = Key('scale')
)");
    const auto lookups = [&] {
        const int count = program["Key"].attr("lookups").cast<int>();
        program["Key"].attr("lookups") = 0;
        return count;
    };
    const int kind = step(StepKind::kClass, -1, none, none, "class of owner");
    step(StepKind::kMember, kind, program["key"], none, "scale of class Owner");
    EXPECT_EQ(check(program["owner"]), "");
    EXPECT_GT(lookups(), 0);
    EXPECT_EQ(check(program["owner"]), "");
    EXPECT_EQ(lookups(), 0);
    program.run("Below.other = 1");
    EXPECT_EQ(check(program["owner"]), "");
    EXPECT_GT(lookups(), 0);
}

class CodeTest : public CallableGuardTest {
protected:
    Program program{"def scale(x): return x * 2\ndef other(x): return x * 3\n"};
    void expect_code() {
        const py::object weak = py::module_::import("weakref").attr("ref")(program["scale"]);
        step(StepKind::kCode, -1, weak, program["scale"].attr("__code__"), "code of scale");
    }
};

TEST_F(CodeTest, OtherCodeOfAFunctionIsSeenAndItsOwnIsRightAgain) {
    expect_code();
    for (int repeat = 0; repeat < 3; ++repeat) EXPECT_EQ(check(none), "");
    program.run("first = scale.__code__\nscale.__code__ = other.__code__");
    for (int repeat = 0; repeat < 2; ++repeat) EXPECT_EQ(check(none), "code of scale was replaced by another object");
    program.run("scale.__code__ = first");
    EXPECT_EQ(check(none), "");
}

TEST_F(CodeTest, EqualCodeIsOtherCode) {
    expect_code();
    EXPECT_EQ(check(none), "");
    program.run("scale.__code__ = scale.__code__.replace(co_firstlineno=100)");
    EXPECT_EQ(check(none), "code of scale was replaced by another object");
}

TEST_F(CodeTest, DefaultsAndAttributesOfAFunctionAreNotItsCode) {
    expect_code();
    EXPECT_EQ(check(none), "");
    program.run("scale.__defaults__ = (1,)\nscale.gain = 3.0");
    EXPECT_EQ(check(none), "");
}

TEST_F(CodeTest, OtherFunctionsMayGetOtherCode) {
    expect_code();
    EXPECT_EQ(check(none), "");
    program.run("other.__code__ = (lambda x: x).__code__");
    EXPECT_EQ(check(none), "");
}

TEST_F(CodeTest, AFunctionThatIsGoneHasNoCode) {
    expect_code();
    EXPECT_EQ(check(none), "");
    program.run("del scale");
    const int kept = step(StepKind::kInstanceDict, -1, none, none, "attributes");  // makes it look again
    EXPECT_EQ(check(namespace_of(py::dict())), "code of scale was replaced by another object");
    EXPECT_EQ(kept, 1);
}

TEST_F(CodeTest, WhatIsNoFunctionHasNoCode) {
    program.run("class Owner: pass\nowner = Owner()");
    step(StepKind::kCode, -1, py::module_::import("weakref").attr("ref")(program["owner"]),
         program["scale"].attr("__code__"), "code of scale");
    EXPECT_EQ(check(none), "code of scale was replaced by another object");
}

}  // namespace
}  // namespace te_graph::graphs
