#include "common/grad_buffers.h"

#include <algorithm>

namespace te_graph {

// parameter: [...].
std::optional<at::Tensor> GradBuffers::request(const at::Tensor& parameter, bool to_main_grad) {
    const auto is_it = [&](const auto& one) { return one.parameter.is_same(parameter); };
    if (std::none_of(requests_.begin(), requests_.end(), is_it)) requests_.push_back({parameter, to_main_grad});
    const auto offer = std::find_if(offers_.begin(), offers_.end(), is_it);
    return offer == offers_.end() ? std::nullopt : std::optional(offer->buffer);
}

void GradBuffers::offer(const at::Tensor& parameter, at::Tensor buffer) {
    offers_.push_back({parameter, std::move(buffer)});
}

}  // namespace te_graph
