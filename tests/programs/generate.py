"""Draw a program from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from .draft import TURNING, Draft
from .draft import parameter_facts as facts
from .program import Group, Piece, Program
from .zoo import CHANGES, ZOO

_ZEROS = "torch.zeros(4, {}, dtype={}, device=DEV)"
_F64 = "torch.float64"
MAIN_GRADS = (
    _ZEROS.format(4, _F64),
    _ZEROS.format(4, _F64) + ".t()",
    _ZEROS.format(8, _F64) + "[:, 4:]",
    _ZEROS.format(8, _F64) + "[:, ::2]",
    _ZEROS.format(4, "torch.float32"),
    _ZEROS.format(16, _F64) + "[1].view(4, 4)",
)
SETTINGS = (
    "torch.backends.mha.set_fastpath_enabled(False)",
    "torch.set_default_dtype(torch.float64)",
    "torch.use_deterministic_algorithms(False)",
)


def generate(seed: int, device: str) -> Program:
    """The program of ``seed``."""
    rng = random.Random(seed)
    is_exact = rng.random() < 0.75
    is_ordered = not is_exact and rng.random() < 0.5
    draft = Draft(rng, is_exact, is_ordered, device)
    _draw_pieces(draft)
    _draw_groups(draft)
    for event in (_tie, _prepare_parameter):
        if rng.random() < 0.35:
            event(draft)
    draft.forward()
    events, weights = zip(*EVENTS, strict=True)
    for _ in range(rng.randint(3, 12)):
        draft.wait()
        rng.choices(events, weights)[0](draft)
    draft.wait()
    while draft.pending and rng.random() < 0.95:
        draft.backward()
    while draft.late:
        _late_backward(draft)
    _look_at_all(draft)
    steps = tuple(draft.steps)
    return Program(seed, device, is_exact or is_ordered, tuple(draft.pieces), tuple(draft.groups), steps)


def _draw_pieces(draft: Draft) -> None:
    kinds = {
        name: kind.weight
        for name, kind in ZOO.items()
        if (kind.exact or not draft.is_exact) and not (draft.is_ordered and name in TURNING)
    }
    if not draft.is_exact:  # what rounds is what such a program is about
        kinds = {name: weight * (1 if ZOO[name].exact else 4) for name, weight in kinds.items()}
    if draft.rng.random() < 0.3:  # how random numbers fall depends on the layout of what is drawn
        draft.may_turn = False
    kinds = {n: w for n, w in kinds.items() if not (ZOO[n].random if draft.may_turn else n in TURNING)}
    for name in draft.rng.choices(list(kinds), list(kinds.values()), k=draft.rng.randint(1, 4)):
        if not (ZOO[name].call == "{o}" and any(piece.name == name for piece in draft.pieces)):
            draft.pieces.append(Piece(len(draft.pieces), name, draft.number(), draft.is_exact))


def _draw_groups(draft: Draft) -> None:
    rng = draft.rng
    graphed = [piece for piece in draft.pieces if rng.random() < 0.8] or draft.pieces[:1]
    cut = rng.randint(1, len(graphed)) if rng.random() < 0.3 else len(graphed)
    for members in (graphed[:cut], graphed[cut:]):
        if not members:
            continue
        options: dict[str, object] = {"max_in_flight": rng.choice((1, 2, 2, 3, 4))}
        can_chain = all(piece.kind.takes == 1 and piece.kind.gives[0] == "d" for piece in members[:-1])
        if len(members) > 1 and can_chain and members[-1].kind.takes == 1 and rng.random() < 0.4:
            options["chain"] = True  # later samples are left out where that is possible
        if rng.random() < 0.7:
            options["on_mismatch"] = rng.choice(("eager", "capture", "capture"))
        if rng.random() < 0.3:
            options["on_exhausted"] = "eager"
        if rng.random() < 0.1:
            options["accumulate_grads"] = False
        if rng.random() < 0.4:
            options["hooks"] = "captured"
        draft.groups.append(Group(tuple(piece.number for piece in members), tuple(options.items())))


def _tie(draft: Draft) -> None:
    """Two pieces share a parameter."""
    plain = [p.number for p in draft.pieces if facts(p.name) and facts(p.name)[0] == (True, True)]
    plain = [n for n in plain if draft.pieces[n].name not in ("Line", "Closure", "Convolution", "ChannelsLast")]
    if len(plain) > 1 and not draft.is_ordered:
        one, other = draft.rng.sample(plain, 2)
        draft.tied = {one, other}
        draft.add("tie", f"if hasattr(o{one}, 'p') and hasattr(o{other}, 'p'): o{one}.p = o{other}.p", is_early=True)


def _prepare_parameter(draft: Draft) -> None:
    """Something about a parameter before the capture."""
    rng, found = draft.rng, draft.some_parameter(is_plain=True)
    if found is None:
        return
    parameter, owner = found
    way = rng.random()
    shared_by = {draft.pieces[number].name for number in draft.sharing(owner)}
    is_rounded = "SmallGrad" in shared_by and not draft.is_exact  # by eager execution, which goes through .grad
    able = not (draft.is_ordered or is_rounded or "ReturnsParameter" in shared_by)
    if way < 0.4 and able and draft.accumulates(owner):
        draft.main_grads |= draft.sharing(owner)
        code = f"{parameter}.main_grad = {rng.choice(MAIN_GRADS)}\nif not graph: add_into_main_grad({parameter})"
        draft.add("main_grad", code, is_early=True)
    elif way < 0.6:
        draft.add("gradient before", f"{parameter}.grad = {draft.data()}", is_early=True)
    elif way < 0.7:
        draft.add("freeze", f"{parameter}.requires_grad_(False)", is_early=True)
    elif way < 0.8:
        draft.add("grad_dtype", f"{parameter}.grad_dtype = torch.float32", is_early=True)
    else:
        draft.add("hook before", f"{parameter}.register_hook(lambda g: g * 2)", is_early=True)


def _backward(draft: Draft) -> None:
    draft.backward() if draft.pending else draft.forward()


def _gradient(draft: Draft) -> None:
    """What users do to gradients between steps."""
    found = draft.some_parameter()
    if found is None or found[1] in draft.main_grads:  # what eager does for main_grad goes through .grad
        return
    p = found[0]
    owner = p.split("(")[1].split(")")[0]
    ways = [
        f"for p in params({owner}): p.grad = None",
        f"{owner}.zero_grad()",
        f"{owner}.zero_grad(set_to_none=False)",
        f"{p}.grad = torch.ones_like({p})",
        f"if {p}.grad is not None: {p}.grad = {p}.grad.clone()",
        f"if {p}.grad is not None: {p}.grad.mark = 1",
        f"see('mark', hasattr({p}.grad, 'mark'))",
        f"if {p}.grad is not None: {p}.grad.mul_(2)",
        f"if {p}.grad is not None: {p}.grad = {p}.grad.t()" if draft.some_parameter(is_plain=True) else "pass",
        f"if {p}.grad is not None: {p}.grad.data = torch.ones_like({p}.grad)",
    ]
    draft.add("change a gradient", draft.rng.choice(ways))


def _parameter(draft: Draft) -> None:
    """What users do to parameters."""
    found = draft.some_parameter()
    if found is None or draft.pending:
        return
    p, owner = found
    name = f"{owner} of {len(draft.steps)}"
    ways = [
        f"{p}.data.add_(1)",
        f"{p}.data = {p}.data.clone()",
        f"with torch.no_grad(): {p}.mul_(-1)",
        f"{p}.requires_grad_(False)",
        f"{p}.requires_grad_(not {p}.requires_grad)",
        f"o{owner}.load_state_dict({{k: v + 1 for k, v in o{owner}.state_dict().items()}})",
        f"o{owner}.load_state_dict({{k: v.clone() for k, v in o{owner}.state_dict().items()}}, assign=True)",
    ]
    if owner not in draft.main_grads:
        # Replays of several results also call hooks of what gets no gradient (docs/limits.md): these must not matter.
        calls_more_hooks = any(len(piece.kind.gives) > 1 for piece in draft.pieces)
        after = "None" if calls_more_hooks else "setattr(p, 'grad', None)"
        ways += [
            f"{p}.register_hook(lambda g: g * 2)",
            f"{p}.register_hook(lambda g: see('{name} hook', g))",
            f"{p}.register_hook(lambda g: keep('{name} hook', g))",
            f"{p}.register_post_accumulate_grad_hook(lambda p: see('post {name} hook', p.grad))",
            f"{p}.register_post_accumulate_grad_hook(lambda p: {after})",
        ]
    way = draft.rng.choice(ways)
    draft.add(f"parameter: {way.replace(p, 'p').split('(')[0].split(' = ')[0]}", way)


def _optimizer(draft: Draft) -> None:
    if draft.pending or not draft.with_parameters():
        return
    if not draft.optimizer:
        draft.optimizer = draft.name("opt")
        owners = ", ".join(f"o{piece.number}" for piece in draft.with_parameters())
        parameters = f"{{id(p): p for o in ({owners},) for p in params(o)}}.values()"
        kinds = ["SGD({}, lr=0.5, momentum=0.5)"]
        # AdamW takes no conjugate view, as autograd keeps it; what graphs leave is none (docs/limits.md).
        if not draft.is_exact and not any(piece.name == "ConjugateGrad" for piece in draft.pieces):
            # With torch's eps a gradient of rounding errors alone, which cancels otherwise, makes a whole step.
            kinds.append("AdamW({}, lr=0.1, eps=1.0)")
        kind = draft.rng.choice(kinds)
        draft.add("optimizer", f"{draft.optimizer} = torch.optim.{kind.format(parameters)}")
    draft.add("optimizer step", f"{draft.optimizer}.step()")
    zero = draft.rng.choice(("zero_grad()", "zero_grad(set_to_none=False)"))
    draft.add("zero_grad", f"{draft.optimizer}.{zero}")


def _change(draft: Draft) -> None:
    """Something between calls that eager execution notices."""
    rng, piece = draft.rng, draft.rng.choice(draft.pieces)
    if draft.pending and rng.random() < 0.7:
        return
    o = f"o{piece.number}"
    own = [line.format(o=o, n=draft.number()) for line in CHANGES.get(piece.name, ())]
    if own and rng.random() < 0.75:
        draft.add(f"change of {piece.name}", rng.choice(own))
        return
    if rng.random() < 0.1:
        draft.add("setting", rng.choice(SETTINGS))
    if piece.kind.call == "{o}":
        return
    label = f"{o} of {len(draft.steps)}"
    ways = [
        f"{o}.eval()",
        f"{o}.train()",
        f"{o}.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))",
        f"{o}.note = 1",
    ]
    if not (piece.kind.call and draft.captures_hooks(piece.number)):  # those run in captures, and in no replay
        ways += [
            f"{o}.register_forward_hook(lambda module, args, result: see('{label} forward hook', args[0]))",
            f"{o}.register_full_backward_hook(lambda module, gi, go: see('{label} backward hook', go[0]))",
        ]
    draft.add("change of a module", rng.choice(ways))


def _call_otherwise(draft: Draft) -> None:
    """A call without gradients, in eval mode, or of a copy."""
    rng, piece = draft.rng, draft.rng.choice(draft.pieces)
    result, number = draft.name("n"), piece.number
    arguments = ", ".join(f"data({draft.number()}, DEV)" for _ in range(piece.kind.takes))
    call = f"{result} = m{number}({arguments})"
    ways = [f"with torch.no_grad(): {call}", f"with torch.inference_mode(): {call}"]
    if piece.kind.call != "{o}":
        ways.append(f"o{number}.eval()\nwith torch.no_grad(): {call}\no{number}.train()")
        if not draft.pending:
            ways.append(f"c{number} = copy.deepcopy(o{number})\n{result} = c{number}({arguments})")
    way = rng.choice(ways)
    draft.add("call otherwise", way)
    verb = "see" if piece.kind.aliases else "keep"
    results = f"{result} if isinstance({result}, tuple) else [{result}]"
    look = f"for i, y in enumerate({results}): {verb}(f'{result}[{{i}}]', y)"
    draft.add("keep a result", look)


def _late_backward(draft: Draft) -> None:
    """Eager code saves what calls may write, and its backward waits over later steps."""
    if draft.late:
        loss, leaf = draft.late.pop()
        draft.add("late backward", f"see('{loss} backward', late_backward({loss}))\nsee('{leaf}.grad', {leaf}.grad)")
        return
    able = [piece for piece in draft.pieces if piece.kind.call != "{o}"]
    if able:
        loss, leaf = draft.name("l"), draft.name("x")
        owner = f"o{draft.rng.choice(able).number}"
        draft.add("late loss", f"{leaf} = leaf({draft.number()}, DEV)\n{loss} = product({leaf}, {owner})")
        draft.late.append((loss, leaf))


def _threads(draft: Draft) -> None:
    rng = draft.rng
    able = [p for p in draft.pieces if not p.kind.random and p.kind.takes == 1 and p.kind.gives == "d"]
    if len(able) < 2 or draft.pending:
        return
    chosen = rng.sample(able, 2)
    if {piece.number for piece in chosen} == draft.tied and any("hook" in step.kind for step in draft.steps):
        return  # a hook of the parameter of both would see gradients in the order that threads happen to take
    lines = []
    works = []
    for piece in chosen:
        work, x, y = draft.name("work"), draft.name("x"), draft.name("y")
        lines += [f"def {work}():", f"    for i in range({rng.randint(1, 3)}):"]
        lines += [f"        {x} = leaf(i, DEV); {y} = m{piece.number}({x}); ({y} * {y}).sum().backward()"]
        lines += [f"        see('{y}', {y}); see('{x}.grad', {x}.grad)"]
        works.append(work)
    draft.add("threads", "\n".join([*lines, f"in_threads({', '.join(works)})"]))


def _look_at_all(draft: Draft) -> None:
    for piece in draft.pieces:
        if facts(piece.name):
            draft.add("see parameter gradients", f"grads('o{piece.number} end', o{piece.number})")
        if piece.kind.call != "{o}":
            code = f"for k, v in o{piece.number}.state_dict().items(): see(f'o{piece.number}.{{k}}', v)"
            draft.add("see the state", code)
    for batch in draft.done:
        for leaf in batch.leaves:
            draft.add("see an input gradient", f"see('{leaf}.grad', {leaf}.grad)")


EVENTS: tuple[tuple[Callable[[Draft], None], int], ...] = (
    (Draft.forward, 8),
    (_backward, 12),
    (_gradient, 3),
    (_parameter, 2),
    (_optimizer, 2),
    (_change, 3),
    (_call_otherwise, 2),
    (_late_backward, 3),
    (_threads, 1),
)
