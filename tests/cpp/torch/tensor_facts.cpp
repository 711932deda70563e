// TensorFacts: which changes of a tensor are told from the tensor that was seen, and which are not changes.
#include "graphs/guards/tensor_facts.h"

#include <ATen/core/NamedTensor.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <vector>

namespace te_graph::graphs {
namespace {

bool is_at_address(const TensorFacts& facts, const at::Tensor& tensor) {
    return facts.is_address_of(*tensor.unsafeGetTensorImpl());
}

class Facts : public testing::Test {
protected:
    const at::Tensor tensor = at::rand({4, 4});
    const TensorFacts facts{tensor};
};

TEST_F(Facts, MatchTheTensorItsAliasesAndOtherValuesInItsMemory) {
    EXPECT_TRUE(facts.match(tensor));
    EXPECT_TRUE(facts.match(tensor.detach()));
    EXPECT_TRUE(facts.match(tensor.view({16}).view({4, 4})));
    EXPECT_TRUE(facts.match(tensor.t().t()));
    tensor.mul_(2);
    EXPECT_TRUE(facts.match(tensor));
    EXPECT_EQ(facts.dtype(), at::kFloat);
    EXPECT_EQ(facts.sizes(), (at::IntArrayRef{4, 4}));
    EXPECT_EQ(facts.strides(), (at::IntArrayRef{4, 1}));
}

TEST_F(Facts, OfNothingMatchNoTensor) {
    EXPECT_FALSE(TensorFacts().match(tensor));
    EXPECT_FALSE(TensorFacts().match(at::rand({0})));
}

TEST_F(Facts, TellOtherMemoryInTheSameTensor) {
    const at::Tensor original = tensor.detach();
    tensor.set_data(tensor.clone());
    EXPECT_FALSE(facts.match(tensor));
    EXPECT_FALSE(is_at_address(facts, tensor));
    tensor.set_data(original);
    EXPECT_TRUE(facts.match(tensor));
}

TEST_F(Facts, TellAStorageThatWasExchanged) {
    const at::Storage original = tensor.storage();
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(at::rand({4, 4}).storage());
    EXPECT_FALSE(facts.match(tensor));
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(original);
    EXPECT_TRUE(facts.match(tensor));
}

TEST_F(Facts, TellNamesOfDimensions) {
    const auto names = [](const char* first) {
        return std::vector<at::Dimname>{at::Dimname::fromSymbol(at::Symbol::dimname(first)), at::Dimname::wildcard()};
    };
    at::internal_set_names_inplace(tensor, names("rows"));
    EXPECT_FALSE(facts.match(tensor));
    EXPECT_FALSE(facts.has_form_of(tensor));
    const TensorFacts named(tensor);
    EXPECT_TRUE(named.match(tensor));
    at::internal_set_names_inplace(tensor, names("columns"));
    EXPECT_FALSE(named.match(tensor));
    at::internal_set_names_inplace(tensor, std::vector<at::Dimname>(2, at::Dimname::wildcard()));
    EXPECT_FALSE(named.match(tensor));
    EXPECT_TRUE(facts.match(tensor));
}

TEST_F(Facts, TellMemoryThatWasExchangedInsideTheStorage) {
    const at::Tensor other = at::rand({4, 4});
    at::DataPtr memory = other.storage().set_data_ptr(at::DataPtr());
    at::DataPtr original = tensor.storage().set_data_ptr(std::move(memory));
    EXPECT_FALSE(facts.match(tensor));
    other.storage().set_data_ptr(std::move(original));
    EXPECT_TRUE(facts.match(other));  // a tensor of another storage over the very memory
}

TEST_F(Facts, TellAnotherOffsetIntoTheSameStorage) {
    const at::Tensor flat = at::rand({20});
    const TensorFacts last(flat.slice(0, 4, 20));
    EXPECT_TRUE(last.match(flat.slice(0, 4, 20)));
    EXPECT_FALSE(last.match(flat.slice(0, 3, 19)));
    EXPECT_FALSE(is_at_address(last, flat));
}

TEST_F(Facts, TellAnotherDtypeOverTheSameMemory) {
    tensor.set_data(tensor.view(at::kInt));
    EXPECT_FALSE(facts.match(tensor));
    EXPECT_TRUE(is_at_address(facts, tensor));
}

TEST_F(Facts, TellOtherSizesOverTheSameMemory) {
    EXPECT_FALSE(facts.match(tensor.view({2, 8})));
    EXPECT_FALSE(facts.match(tensor.view({16})));
    EXPECT_FALSE(facts.match(tensor.unsqueeze(0)));
    EXPECT_FALSE(facts.match(tensor.slice(0, 0, 3)));
    EXPECT_FALSE(facts.match(tensor.slice(1, 0, 3)));
}

TEST_F(Facts, TellOtherStridesOverTheSameMemory) {
    EXPECT_FALSE(facts.match(tensor.t()));
    EXPECT_FALSE(facts.match(tensor.as_strided({4, 4}, {0, 1})));
    EXPECT_TRUE(TensorFacts(tensor.t()).match(tensor.t()));
}

TEST_F(Facts, TellAViewThatIsReadWithTheOtherSign) {
    const at::Tensor negated = at::_neg_view(tensor);
    ASSERT_TRUE(is_at_address(facts, negated));
    EXPECT_FALSE(facts.match(negated));
}

TEST_F(Facts, TellAConjugatedView) {
    const at::Tensor complex = at::rand({3}, at::kComplexFloat);
    const TensorFacts plain(complex);
    EXPECT_TRUE(plain.match(complex));
    EXPECT_FALSE(plain.match(complex.conj()));
    EXPECT_TRUE(plain.match(complex.conj().conj()));
}

TEST_F(Facts, OfANumberMatchItAndNoOther) {
    const at::Tensor number = at::rand({});
    const TensorFacts known(number);
    EXPECT_TRUE(known.match(number));
    EXPECT_FALSE(known.match(at::rand({})));
    EXPECT_FALSE(known.match(number.view({1})));
}

// What has no elements has no values that a replay could get wrong, so only shape and dtype of it tell.
TEST_F(Facts, OfATensorWithoutElementsTellShapeAndDtypeAndAStorageThatHasMemory) {
    const TensorFacts empty(at::zeros({0, 3}));
    EXPECT_TRUE(empty.match(at::zeros({0, 3})));
    EXPECT_FALSE(empty.match(at::zeros({3, 0})));
    EXPECT_FALSE(empty.match(at::zeros({0, 3}, at::kDouble)));
    EXPECT_FALSE(empty.match(at::zeros({1, 3})));
    const at::Tensor flat = at::rand({4}), other = at::rand({4});
    const TensorFacts slice(flat.slice(0, 2, 2));
    EXPECT_TRUE(slice.match(flat.slice(0, 2, 2)));
    EXPECT_FALSE(slice.match(flat.slice(0, 1, 1)));
    EXPECT_FALSE(slice.match(other.slice(0, 2, 2)));
}

TEST_F(Facts, TellASparseTensorOfTheSameShape) {
    EXPECT_FALSE(facts.match(tensor.to_sparse()));
    EXPECT_FALSE(facts.match(at::zeros({4, 4}).to_sparse()));
    EXPECT_FALSE(TensorFacts(at::zeros({0, 4})).match(at::zeros({0, 4}).to_sparse()));
}

}  // namespace
}  // namespace te_graph::graphs
