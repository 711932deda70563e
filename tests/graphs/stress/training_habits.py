"""Habits of training loops, for random training scripts: each is given a trainer, and numbers of its own."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves as tensors
from training_blocks import CHANGE_SOMETHING, WIDTH, Adapter

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adamw fused, tensor lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), fused=True),
    "adam foreach": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=True, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
}


def train(t: Any, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 2])):
        if t.step is not None:
            t.note("loss", t.step(*t.batch()))
            continue
        for _ in range(t.script.accumulation):
            t.backward(t.loss(rng) / t.script.accumulation)
        t.update()


def several_in_flight(t: Any, rng: random.Random) -> None:
    losses = [t.loss(rng) for _ in range(rng.choice([2, 3]))]
    if rng.random() < 0.5:
        losses.reverse()
    for loss in losses:
        t.backward(loss)
    t.update()


def summed(t: Any, rng: random.Random) -> None:
    t.backward(t.loss(rng) + t.loss(rng))
    t.update()


def retained(t: Any, rng: random.Random) -> None:
    loss = t.loss(rng)
    loss.backward(retain_graph=True)
    loss.backward()
    t.update()


def evaluate(t: Any, rng: random.Random) -> None:
    t.model.eval()
    with rng.choice([torch.no_grad, torch.inference_mode, contextlib.nullcontext])():
        t.note("evaluation", t.loss(rng).detach())
        t.size = 2
        t.note("evaluation of 2", t.loss(rng).detach())
        t.size = 3
    t.model.train()


def evaluate_average(t: Any, rng: random.Random) -> None:
    if t.average is None:
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        t.average = torch.optim.swa_utils.AveragedModel(t.model, multi_avg_fn=average, use_buffers=False)
    train(t, rng)
    with torch.no_grad():
        t.note("average", t.average(t.batch()[0])[0])


def small_batch(t: Any, rng: random.Random) -> None:
    t.size = rng.choice([1, 2])
    train(t, rng)
    t.size = 3


def other_length(t: Any, rng: random.Random) -> None:
    t.length = rng.choice([3, 6, 9])
    train(t, rng)


def masked(t: Any, rng: random.Random) -> None:
    mask = (torch.rand(t.size, 1, t.length, t.length) < 0.7) | torch.eye(t.length, dtype=torch.bool)
    t.backward(t.loss(rng, mask=mask))
    t.update()


def freeze(t: Any, rng: random.Random) -> None:
    block = rng.choice(list(t.model.blocks))
    for parameter in block.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    t.model.head.weight.requires_grad_(True)
    train(t, rng)


def freeze_embedding(t: Any, rng: random.Random) -> None:
    t.model.embed.weight.requires_grad_(not t.model.embed.weight.requires_grad)
    t.model.norm.weight.requires_grad_(True)
    train(t, rng)


def edit_weights(t: Any, rng: random.Random) -> None:
    parameter = rng.choice(list(t.model.parameters()))
    how = rng.randrange(5)
    with torch.no_grad():
        if how == 0:
            parameter.mul_(0.9)
        elif how == 1:
            parameter.data.mul_(0.9)
        elif how == 2:
            parameter.data = parameter.data * 0.9
        elif how == 3:
            parameter.copy_(parameter.clone().flip(0))
        else:
            nn.init.normal_(parameter, std=0.2)
    train(t, rng)


def merge_adapters(t: Any, rng: random.Random) -> None:
    for block in t.model.blocks:
        if isinstance(block, Adapter):
            block.merge()
    train(t, rng)


def change_dropout(t: Any, rng: random.Random) -> None:
    for module in t.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rng.choice([0.0, 0.1, 0.3])
    train(t, rng)


def batch_norm_in_evaluation(t: Any, rng: random.Random) -> None:
    for module in t.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.train(not module.training)
    train(t, rng)


def save_and_resume(t: Any, rng: random.Random) -> None:
    kept = copy.deepcopy([t.model.state_dict(), t.optimizer.state_dict(), t.schedule.state_dict()])
    state = torch.get_rng_state()
    train(t, rng)
    for one, saved in zip((t.model, t.optimizer, t.schedule), kept, strict=True):
        one.load_state_dict(saved)
    torch.set_rng_state(state)
    train(t, rng)


def assign_state(t: Any, rng: random.Random) -> None:
    """load_state_dict(assign=True): other parameters, and so another optimizer."""
    with warnings.catch_warnings():
        t.model.load_state_dict(copy.deepcopy(t.model.state_dict()), assign=True)
    if t.model.head.weight.data_ptr() != t.model.embed.weight.data_ptr() and t.script.is_tied:
        t.model.head.weight = t.model.embed.weight
    new_optimizer(t, rng)


def log_activations(t: Any, rng: random.Random) -> None:
    block = rng.choice(list(t.model.blocks))
    where = rng.choice(["result", "input", "gradient", "full gradient", "inside"])
    if where == "result":
        hook = block.register_forward_hook(lambda m, a, r: t.note("activation", tensors(r)[0].float().norm()))
    elif where == "input":
        hook = block.register_forward_pre_hook(lambda m, a: t.note("input", a[0].float().norm()))
    elif where == "gradient":
        hook = block.register_full_backward_pre_hook(lambda m, g: t.note("gradient of results", [x is None for x in g]))
    elif where == "full gradient":
        hook = block.register_full_backward_hook(lambda m, i, o: t.note("gradient of inputs", i[0]))
    else:
        inner = rng.choice(list(block.modules()))
        hook = inner.register_forward_hook(lambda m, a, r: t.note("inside", tensors(r)[0].float().norm()))
    train(t, rng)
    hook.remove()
    train(t, rng)


def gradient_hook(t: Any, rng: random.Random) -> None:
    # Not of those that only a result without a gradient depends on: their hooks are called with None.
    hookable = [(n, p) for n, p in t.model.named_parameters() if p.requires_grad and "side" not in n]
    name, parameter = rng.choice(hookable)
    kind = rng.randrange(3)
    if kind == 0:
        hook = parameter.register_hook(lambda g: t.note(f"hook of {name}", g))
    elif kind == 1:
        hook = parameter.register_hook(lambda g: g * 0.5)
    else:
        hook = parameter.register_post_accumulate_grad_hook(lambda p: t.note(f"grad after {name}", p.grad))
    train(t, rng)
    if rng.random() < 0.7:
        hook.remove()
    train(t, rng)


def edit_gradients(t: Any, rng: random.Random) -> None:
    t.backward(t.loss(rng))
    parameter = rng.choice([p for p in t.model.parameters() if p.requires_grad])
    how = rng.randrange(4)
    if parameter.grad is not None:
        if how == 0:
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
        elif how == 1:
            parameter.grad = None
        elif how == 2:
            parameter.grad = parameter.grad.clone().t().contiguous().t() if parameter.dim() == 2 else None
        else:
            t.kept.append(parameter.grad)
    t.backward(t.loss(rng))
    t.update()


def stopped(t: Any, rng: random.Random) -> None:
    """An exception in the middle of a step; what was under way is dropped."""
    with contextlib.suppress(KeyboardInterrupt):
        loss = t.loss(rng)
        if rng.random() < 0.5:
            loss.backward()
        raise KeyboardInterrupt
    loss = None
    t.optimizer.zero_grad()
    train(t, rng)


def stopped_in_backward(t: Any, rng: random.Random) -> None:
    def stop(gradient: Tensor) -> None:
        raise KeyboardInterrupt

    loss = t.loss(rng)
    hook = t.model.norm.weight.register_hook(stop)
    with contextlib.suppress(KeyboardInterrupt):
        loss.backward()
    hook.remove()
    del loss
    t.optimizer.zero_grad()
    train(t, rng)


def hold_loss(t: Any, rng: random.Random) -> None:
    """A loss of an earlier step that is still held, with all that its backward needs."""
    held = t.loss(rng)
    train(t, rng)
    if rng.random() < 0.5:
        t.kept.append(held)


def adversarial(t: Any, rng: random.Random) -> None:
    """The gradient of what the blocks are given, then a step on what it changed."""
    x = torch.randn(t.size, t.length, WIDTH, dtype=t.script.dtype, requires_grad=True)

    def through(x: Tensor) -> Tensor:
        for block in t.model.blocks:
            x = tensors(block(x))[0]
        return x.float().square().mean()

    (gradient,) = torch.autograd.grad(through(x), [x])
    t.note("gradient of x", gradient)
    t.backward(through((x + 0.1 * gradient.sign()).detach()))
    t.update()


def recompute(t: Any, rng: random.Random) -> None:
    """Blocks whose forward changes something are left out: eager checkpoints change it twice."""
    t.model.is_recomputed = not CHANGE_SOMETHING & set(t.script.names)
    train(t, rng)
    t.model.is_recomputed = False


def scale_losses(t: Any, rng: random.Random) -> None:
    if t.script.dtype == torch.float32:
        t.scaler = None if t.scaler is not None else torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    train(t, rng)


def skipped_step(t: Any, rng: random.Random) -> None:
    if t.scaler is not None:
        t.backward(t.loss(rng) * float("inf"))
        t.update()
    train(t, rng)


def new_optimizer(t: Any, rng: random.Random) -> None:
    t.use(OPTIMIZERS["sgd"]([p for p in t.model.parameters() if p.requires_grad]))
    train(t, rng)


def capture_again(t: Any, rng: random.Random) -> None:
    """A notebook's cell that is run once more."""
    if t.is_graphed and t.script.mode not in ("step", "optimizer"):
        for module in t.model.modules():
            handle = getattr(module, "te_graph", None)
            if handle is not None:
                handle.reset()
        t.graph()
    train(t, rng)


def copy_model(t: Any, rng: random.Random) -> None:
    """Training goes on with the model; the copy is looked at, and changed."""
    twin = copy.deepcopy(t.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    t.note("copy", twin(t.batch()[0])[0].detach())
    train(t, rng)


def profiled(t: Any, rng: random.Random) -> None:
    with torch.autograd.profiler.profile(use_kineto=False), torch.autograd.profiler.record_function("step"):
        train(t, rng)
    with torch.autograd.set_detect_anomaly(True, check_nan=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(t, rng)


def shared_block(t: Any, rng: random.Random) -> None:
    """From now on one block is used twice."""
    if len(t.model.blocks) < 6:
        t.model.blocks.append(rng.choice(list(t.model.blocks)))
    train(t, rng)


def penalty(t: Any, rng: random.Random) -> None:
    weights = [p for p in t.model.parameters() if p.requires_grad and p.dim() > 1]
    t.backward(t.loss(rng) + 1e-3 * sum(p.float().square().sum() for p in weights[:3]))
    t.update()


EVENTS: dict[str, Callable[[Any, random.Random], None]] = {
    f.__name__: f
    for f in (
        train, several_in_flight, summed, retained, evaluate, evaluate_average, small_batch, other_length, masked,
        freeze, freeze_embedding, edit_weights, merge_adapters, change_dropout, batch_norm_in_evaluation,
        save_and_resume, assign_state, log_activations, gradient_hook, edit_gradients, stopped, stopped_in_backward,
        hold_loss, adversarial, recompute, scale_losses, skipped_step, new_optimizer, capture_again, copy_model,
        profiled, shared_block, penalty,
    )
}  # fmt: skip
