"""What autograd tracks and multi-tensor ops write: refused by name, where torch's own ops would record a gradient."""

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from fp8_references import E4M3
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

ops = torch.ops.te_graph


def one(device: str) -> Tensor:
    return torch.tensor(2.0, device=device)


# Each op with one of its written arguments, [4] each.
WRITES: dict[str, Callable[[Tensor], object]] = {
    "multi_tensor_scale_, tensors": lambda t: ops.multi_tensor_scale_([t], one(t.device)),
    "multi_tensor_scale_, tensors, number": lambda t: ops.multi_tensor_scale_([t], 2.0),
    "multi_tensor_clip_, tensors": lambda t: ops.multi_tensor_clip_([t], one(t.device), 1.0),
    "multi_tensor_clip_norm_, tensors": lambda t: ops.multi_tensor_clip_norm_([t], 1.0),
    "multi_tensor_zero_, tensors": lambda t: ops.multi_tensor_zero_([t]),
    "multi_tensor_copy_, destination": lambda t: ops.multi_tensor_copy_([t], [torch.ones(4, device=t.device)]),
    "multi_tensor_accumulate_, destination": lambda t: ops.multi_tensor_accumulate_(
        [t], [torch.ones(4, device=t.device)]
    ),
    "multi_tensor_accumulate_, source": lambda t: ops.multi_tensor_accumulate_(
        [torch.ones(4, device=t.device)], [t], zero_source=True
    ),
    "fp8_dequantize_out, out": lambda t: ops.fp8_dequantize_out(
        t, torch.ones(4, device=t.device).to(E4M3), one(t.device)
    ),
    "fp8_cast, amax": lambda t: ops.fp8_cast(torch.ones(4, device=t.device), one(t.device), E4M3, amax=t[:1]),
}


def parameter_with_gradient(device: torch.device) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(4, device=device))
    parameter.grad = torch.ones(4, device=device)
    return parameter


# What functions and plans write beside their lists, [] or [1] each, and the name that their message begins with.
FLAGS: dict[str, Callable[[Tensor], object]] = {
    "multi_tensor_clip_norm_": lambda t: tg.clip_grad_norm_(parameter_with_gradient(t.device), 1.0, found_inf=t),
    "multi_tensor_clip_": lambda t: tg.clip_grads_with_norm_(
        parameter_with_gradient(t.device), 1.0, one(t.device), found_inf=t
    ),
    "multi_tensor_accumulate_": lambda t: tg.update_hp_grads(
        [parameter_with_gradient(t.device)], [torch.zeros(4, device=t.device)], found_inf=t
    ),
    "MultiTensorPlan": lambda t: clip_by_plan(torch.ones(4, device=t.device), t),
}


def clip_by_plan(tensor: Tensor, found_inf: Tensor) -> None:
    tg.MultiTensorPlan([tensor]).clip_norm_(1.0, found_inf=found_inf)


def copy_by_plan(tensor: Tensor, source: Tensor) -> None:
    tg.MultiTensorPlan([tensor], [source]).copy_()


def add_by_plan(tensor: Tensor, source: Tensor) -> None:
    tg.MultiTensorPlan([tensor], [source]).accumulate_(zero_source=True)


def update_hp_grads(hp_grad: Tensor, gradient: Tensor | None, store: bool = False) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, device=hp_grad.device))
    parameter.grad = gradient
    tg.update_hp_grads([parameter], [hp_grad], store=store)


# Functions and plans: what they write as the ops do, except that leaves may be written as in an optimizer.
FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "clip_tensors_by_global_norm": lambda t: tg.clip_tensors_by_global_norm([t], 0.1),
    "update_hp_grads": lambda t: update_hp_grads(t, torch.ones(4, device=t.device)),
    "update_hp_grads, gradient": lambda t: update_hp_grads(torch.zeros(4, device=t.device), t),
    "update_hp_grads, store": lambda t: update_hp_grads(t, torch.ones(4, device=t.device), store=True),
    "update_hp_grads, no gradient": lambda t: update_hp_grads(t, None, store=True),
    "MultiTensorPlan, scale": lambda t: tg.MultiTensorPlan([t]).scale_(one(t.device)),
    "MultiTensorPlan, clip": lambda t: tg.MultiTensorPlan([t]).clip_(one(t.device), 1.0),
    "MultiTensorPlan, clip norm": lambda t: tg.MultiTensorPlan([t]).clip_norm_(1.0),
    "MultiTensorPlan, zero": lambda t: tg.MultiTensorPlan([t]).zero_(),
    "MultiTensorPlan, copy": lambda t: copy_by_plan(t, torch.ones(4, device=t.device)),
    "MultiTensorPlan, sources": lambda t: add_by_plan(torch.ones(4, device=t.device), t),
}
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "result": lambda leaf: leaf * 2,
    "view of a result": lambda leaf: torch.cat([leaf * 2, leaf])[:4],
    "view of a leaf": lambda leaf: leaf.view(2, 2).view(4),
    "view that is older than what was recorded": lambda leaf: older_view(leaf),
    "view of a result under no_grad": lambda leaf: view_under_no_grad(torch.cat([leaf * 2, leaf])),
}


def older_view(leaf: Tensor) -> Tensor:
    whole = torch.zeros(8, device=leaf.device)
    view = whole[:4]
    whole.add_(torch.cat([leaf, leaf]))
    return view


def view_under_no_grad(whole: Tensor) -> Tensor:
    with torch.no_grad():
        return whole[:4]


@pytest.mark.parametrize("kind", ["leaf", "result", "tangent"])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_autograd_follows_are_refused_by_the_sentence_of_the_ops(name, kind, device):
    leaf = torch.zeros((), device=device, requires_grad=True)
    match = rf"^{name}: has no gradient, and found_inf, which it writes, requires one; call it under torch.no_grad\(\)"
    if kind == "tangent":
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=rf"^{name}: has no forward-mode"):
            FLAGS[name](forward_ad.make_dual(torch.zeros((), device=device), torch.ones((), device=device)))
        return
    flag = leaf if kind == "leaf" else leaf * 2
    version = flag._version
    with pytest.raises(NotImplementedError, match=match):
        FLAGS[name](flag)
    assert flag._version == version
    with torch.no_grad():
        FLAGS[name](flag)


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("name", [*WRITES, *FUNCTIONS])
def test_results_that_require_a_gradient_are_refused_where_gradients_are_recorded(name, kind, device):
    write = (WRITES | FUNCTIONS)[name]
    leaf = torch.ones(4, device=device, requires_grad=True)
    result = RESULTS[kind](leaf)
    before, version = result.detach().clone(), result._version
    with pytest.raises(NotImplementedError, match=f"^{name.partition(',')[0]}: has no (gradient|derivative)"):
        write(result)
    assert same_bits(result.detach(), before) and result._version == version
    if kind != "view of a result under no_grad":
        result.sum().backward()
        assert leaf.grad.unique().item() in (1, 2)


@pytest.mark.parametrize("name", [*WRITES, *FUNCTIONS])
def test_the_same_results_are_written_under_no_grad_and_when_detached(name, device):
    write = (WRITES | FUNCTIONS)[name]
    leaf = torch.ones(4, device=device, requires_grad=True)
    expected = torch.full((4,), 2.0, device=device)
    write(expected)
    with torch.no_grad():
        result = leaf * 2
        write(result)
    detached = (leaf * 2).detach()
    write(detached)
    assert same_bits(result, expected) and same_bits(detached, expected)
    followed = leaf * 2
    with torch.no_grad():
        write(followed)
    assert same_bits(followed.detach(), expected) and followed._version > 0


@pytest.mark.parametrize("name", WRITES)
def test_ops_refuse_a_leaf_as_those_of_torch_do(name, device):
    leaf = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError):
        leaf.mul_(2)
    with pytest.raises(NotImplementedError, match=f"^{name.partition(',')[0]}: has no gradient"):
        WRITES[name](leaf)
    assert leaf.sum().item() == 4
    with torch.no_grad():
        WRITES[name](leaf)
    assert leaf._version > 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_plans_write_leaves_as_an_optimizer_does(name, device):
    leaf, plain = torch.ones(4, device=device, requires_grad=True), torch.ones(4, device=device)
    FUNCTIONS[name](leaf)
    FUNCTIONS[name](plain)
    assert same_bits(leaf.detach(), plain) and leaf._version > 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_of_leaves_under_no_grad_are_written_as_leaves_are(name, device):
    leaf, plain = torch.ones(8, device=device, requires_grad=True), torch.ones(4, device=device)
    FUNCTIONS[name](view_under_no_grad(leaf))
    FUNCTIONS[name](plain)
    assert same_bits(leaf.detach()[:4], plain) and bool((leaf[4:] == 1).all())


def test_a_plan_looks_at_each_write_whether_autograd_follows_a_tensor_by_now(device):
    leaf, tensor = torch.ones(4, device=device, requires_grad=True), torch.ones(4, device=device)
    source, scale = torch.ones(4, device=device), one(device)
    plan = tg.MultiTensorPlan([tensor], [source])
    step = tg.graphed(lambda: plan.scale_(scale))
    for _ in range(3):
        step()
    tensor.fill_(1).mul_(leaf)
    for write in (lambda: plan.scale_(one(device)), plan.zero_, plan.copy_, plan.accumulate_, step):
        with pytest.raises(NotImplementedError, match=r"tensors\[0\], which it writes, is followed by autograd"):
            write()
    assert tensor.sum().item() == 4 and plan.norm().item() == 2
    with torch.no_grad():
        plan.scale_(one(device))
    assert tensor.sum().item() == 8


@pytest.mark.parametrize("create_graph", [False, True])
def test_clipping_gradients_that_have_a_graph_is_what_torch_does(create_graph, device):
    made = []
    for clip in (tg.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        parameter = torch.nn.Parameter(torch.arange(1.0, 5.0, device=device))
        (parameter.grad,) = torch.autograd.grad((parameter**3).sum(), parameter, create_graph=create_graph)
        clip([parameter], 1.0)
        gradient = parameter.grad.detach()
        made.append((gradient, torch.autograd.grad(parameter.grad.sum(), parameter)[0] if create_graph else gradient))
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("name", [*WRITES, *FUNCTIONS])
def test_tangents_are_refused(name, device):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(4, device=device), torch.ones(4, device=device))
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(NotImplementedError, match=f"^{name.partition(',')[0]}: has no .*derivative"):
                (WRITES | FUNCTIONS)[name](dual)


def gradient_with_tangent(dual: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(4, device=dual.device))
    parameter.grad = dual
    return parameter


# Functions that read a tensor [4] past autograd.
READS: dict[str, Callable[[Tensor], object]] = {
    "multi_tensor_norm": lambda t: ops.multi_tensor_norm([t]),
    "get_total_norm": lambda t: tg.get_total_norm([torch.ones(4, device=t.device), t]),
    "get_total_norm of a list that is taken apart": lambda t: tg.get_total_norm([t, t.to(torch.complex64)]),
    "get_global_norm_of_tensors": lambda t: tg.get_global_norm_of_tensors([t]),
    "multi_tensor_norms": lambda t: tg.multi_tensor_norms([t]),
    "clip_grad_norm_": lambda t: tg.clip_grad_norm_(gradient_with_tangent(t), 1.0),
    "clip_grads_with_norm_": lambda t: tg.clip_grads_with_norm_(parameter_with_gradient(t.device), 1.0, t[0]),
    "plan, tensors": lambda t: tg.MultiTensorPlan([t]).norm(),
    "plan, sources": lambda t: copy_by_plan(torch.zeros(4, device=t.device), t),
    "Fp8Weights, weights": lambda t: tg.Fp8Weights([t.view(2, 2)]).cast_(),
    "Fp8Weights, scale": lambda t: tg.Fp8Weights([torch.ones(2, 2, device=t.device)], scale=t[:1]).cast_(),
}


@pytest.mark.parametrize("name", READS)
def test_tangents_of_what_is_read_are_refused_instead_of_lost(name, device):
    plain = torch.ones(4, device=device)
    READS[name](plain.clone())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(plain.clone(), plain.clone())
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(NotImplementedError, match=r"has no (forward-mode )?derivative"):
                READS[name](dual)
        assert same_bits(forward_ad.unpack_dual(dual).primal, plain)
        READS[name](plain.clone())


def test_a_compiled_function_that_writes_a_result_is_refused(device):
    def double(x: Tensor) -> Tensor:
        y = x * 2
        ops.multi_tensor_scale_([y], 2.0)
        return y

    compiled = torch.compile(double, backend="aot_eager")
    x = torch.ones(4, device=device)
    assert same_bits(compiled(x), double(x))
    with pytest.raises((NotImplementedError, RuntimeError), match="multi_tensor_scale_: has no gradient"):
        compiled(x.clone().requires_grad_())
    torch._dynamo.reset()


def test_what_is_read_may_require_a_gradient(device):
    leaf, copy = torch.ones(4, device=device, requires_grad=True), torch.zeros(4, device=device)
    ops.multi_tensor_copy_([copy], [leaf])
    assert same_bits(copy, leaf.detach()) and not copy.requires_grad
    with pytest.raises(RuntimeError, match="derivative for te_graph::multi_tensor_norm is not implemented"):
        ops.multi_tensor_norm([leaf]).backward()


@pytest.mark.parametrize("name", WRITES)
def test_inference_tensors_are_written_in_inference_mode_alone(name, device):
    with torch.inference_mode():
        made = torch.ones(4, device=device)
    if name.startswith("multi_tensor"):
        with pytest.raises(RuntimeError, match="inference tensor"):
            WRITES[name](made)
        assert made.sum().item() == 4
    with torch.inference_mode():
        WRITES[name](made)


def test_a_plan_of_inference_tensors_reads_them_anywhere_and_writes_them_in_that_mode(device):
    with torch.inference_mode():
        made = torch.ones(4, device=device)
    plan = tg.MultiTensorPlan([made])
    assert plan.norm().item() == 2
    with pytest.raises(RuntimeError, match="inference tensor"):
        plan.scale_(one(device))
    assert made.sum().item() == 4
    with torch.inference_mode():
        plan.scale_(one(device))
    assert made.sum().item() == 8
