// FoundTensors: objects are held, and tensors are not, so that the garbage collector sees all there is.
#include "graphs/guards/found_tensors.h"

#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <thread>

namespace py = pybind11;

namespace te_graph::graphs {
namespace {

class FoundTensorsTest : public testing::Test {
protected:
    const py::gil_scoped_acquire gil;
    py::object first = py::cast(at::rand({3})), second = py::cast(at::rand({2, 0}));
    std::unique_ptr<FoundTensors> found =
        std::make_unique<FoundTensors>(std::vector<PyObject*>{first.ptr(), second.ptr()});
};

TEST_F(FoundTensorsTest, AreTheTensorsOfTheObjects) {
    ASSERT_EQ(found->size(), 2u);
    EXPECT_TRUE((*found)[0].is_same(py::cast<at::Tensor>(first)));
    EXPECT_TRUE((*found)[1].is_same(py::cast<at::Tensor>(second)));
    EXPECT_TRUE(found->is_unswapped(0));
}

TEST_F(FoundTensorsTest, HoldEachObjectOnceAndNoTensor) {
    EXPECT_EQ(Py_REFCNT(first.ptr()), 2);
    EXPECT_EQ((*found)[0].use_count(), 1u);
    found.reset();
    EXPECT_EQ(Py_REFCNT(first.ptr()), 1);
}

TEST_F(FoundTensorsTest, KeepATensorAliveThatNobodyElseHolds) {
    const at::Tensor expected = (*found)[0].clone();
    first = py::none();
    EXPECT_TRUE((*found)[0].equal(expected));
}

TEST_F(FoundTensorsTest, NoticeThatAnObjectStandsForAnotherTensor) {
    const py::object other = py::cast(at::rand({3}));
    py::module_::import("torch").attr("utils").attr("swap_tensors")(first, other);
    EXPECT_FALSE(found->is_unswapped(0));
    py::module_::import("torch").attr("utils").attr("swap_tensors")(first, other);
    EXPECT_TRUE(found->is_unswapped(0));
}

TEST_F(FoundTensorsTest, NoticeNothingWhereATensorGetsOtherData) {
    (*found)[0].set_data(at::rand({3}));
    EXPECT_TRUE(found->is_unswapped(0));
}

TEST_F(FoundTensorsTest, VisitEachObject) {
    std::vector<PyObject*> visited;
    const auto note = [](PyObject* object, void* into) {
        static_cast<std::vector<PyObject*>*>(into)->push_back(object);
        return 0;
    };
    EXPECT_EQ(found->visit(note, &visited), 0);
    EXPECT_EQ(visited, (std::vector<PyObject*>{first.ptr(), second.ptr()}));
    EXPECT_EQ(found->visit([](PyObject*, void*) { return 7; }, nullptr), 7);
}

TEST_F(FoundTensorsTest, MayBeDroppedByAThreadWithoutTheGil) {
    {
        const py::gil_scoped_release without_gil;
        std::thread([this] { found.reset(); }).join();
    }
    EXPECT_EQ(Py_REFCNT(first.ptr()), 1);
    EXPECT_EQ(Py_REFCNT(second.ptr()), 1);
}

}  // namespace
}  // namespace te_graph::graphs
