// Memory in which ops of a captured backward add up the gradients of parameters by themselves.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace te_graph {

class GradBuffers {
public:
    // By the backward of an op, which then adds to the buffer [...] and returns no gradient; nothing: it returns the
    // gradient. Before each replay there is in the buffer what is to be added to. A warm-up learns so who will ask.
    // parameter: [...]. to_main_grad: that the gradient goes to main_grad.
    std::optional<at::Tensor> request(const at::Tensor& parameter, bool to_main_grad);

    // What backwards get from now on. parameter: [...]; buffer: [...] like the parameter.
    void offer(const at::Tensor& parameter, at::Tensor buffer);
    struct Request {
        at::Tensor parameter;
        bool to_main_grad;
    };
    // Those that were made, one for each parameter.
    const std::vector<Request>& requests() const { return requests_; }

private:
    struct Offer {
        at::Tensor parameter, buffer;
    };
    std::vector<Offer> offers_;
    std::vector<Request> requests_;
};

}  // namespace te_graph
