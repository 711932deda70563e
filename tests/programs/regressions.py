"""Programs that once failed, made small: what they show is in their names."""

from __future__ import annotations

import textwrap

from .program import Group, Piece, Program, Step
from .zoo import ZOO

# Name: pieces in order, options of the capture of all of them, and lines. Lines before "---" precede the capture.
REGRESSIONS: dict[str, tuple[tuple[str, ...], dict[str, object], str]] = {
    "two branches, one passes its gradient on": (
        ("Line", "flat_view"),
        {},
        """
        x1 = leaf(754, DEV)
        h2 = x1 * 3
        y3 = m0(h2)
        y4 = m1(h2)
        l5 = (y3 * data(164, DEV)).sum() + y4.t().square().sum() + (y4 * data(551, DEV)).sum()
        l5.backward()
        see('x1.grad', x1.grad)
        """,
    ),
    "a gradient that is passed on, two in flight": (
        ("Table",),
        {"max_in_flight": 2},
        """
        x1 = leaf(24, DEV)
        h2 = x1 * 1
        y3 = m0(h2)
        y4 = m0(h2)
        l5 = (y3 * y3).sum() + (y4 * y4).sum() + y4.sum() + (y3 * data(457, DEV)).sum()
        l5.backward()
        see('x1.grad', x1.grad)
        """,
    ),
    "an input gradient is kept while another callable runs its backward": (
        ("Norms", "Pos"),
        {},
        """
        x1 = leaf(167, DEV)
        y2 = m1(x1 + 1)
        (y2 * data(777, DEV)).sum().backward()
        x3 = leaf(65, DEV)
        y4 = m0(x3)
        (y4 * data(270, DEV)).sum().backward(inputs=[x3])
        see('x1.grad', x1.grad)
        """,
    ),
    "same tensor twice, captured again": (
        ("TwoOfTwo", "itself"),
        {"on_mismatch": "capture"},
        """
        x1 = leaf(791, DEV)
        y3, y4 = m0(x1, x1)
        y5, y6 = m0(y4, y3)
        y7 = m1(y6)
        l8 = (y7 * data(84, DEV)).sum()
        l8.backward()
        see('x1.grad', x1.grad)
        """,
    ),
    "grad_dtype is wider": (
        ("HalfWideGrad",),
        {},
        """
        x1 = leaf(708, DEV)
        y2 = m0(x1)
        l3 = (y2 * data(470, DEV)).sum()
        l3.backward(retain_graph=True)
        l3.backward()
        grads('o0', o0)
        """,
    ),
    "main_grad is a column view": (
        ("Tied",),
        {},
        """
        params(o0)[0].main_grad = torch.zeros(4, 8, dtype=torch.float64, device=DEV)[:, 4:]
        if not graph: add_into_main_grad(params(o0)[0])
        ---
        y1 = m0(leaf(272, DEV))
        (y1 * y1).sum().backward()
        grads('o0', o0)
        """,
    ),
    "column views of one weight": (
        ("ColumnViews",),
        {},
        """
        y1 = m0(leaf(3, DEV))
        (y1 * y1).sum().backward()
        grads('o0', o0)
        """,
    ),
    "an expanded parameter": (
        ("Expanded",),
        {},
        """
        y1 = m0(leaf(3, DEV))
        (y1 * y1).sum().backward()
        grads('o0', o0)
        """,
    ),
    "a gradient that is a conjugate view": (
        ("ConjugateGrad",),
        {},
        """
        y1 = m0(leaf(3, DEV))
        (y1 * y1).sum().backward()
        grads('o0', o0)
        """,
    ),
    "a gradient that is a negative view": (
        ("NegativeGrad",),
        {},
        """
        y1 = m0(leaf(3, DEV))
        (y1 * y1).sum().backward()
        grads('o0', o0)
        """,
    ),
    "a gradient that was computed in forward is kept": (
        ("grad_in_forward",),
        {},
        """
        x1 = leaf(618, DEV)
        h2 = x1.clone()
        y3 = m0(h2)
        g4 = torch.autograd.grad((y3 * data(146, DEV)).sum(), [h2])
        keep('gradient', g4[0])
        y5 = m0(leaf(306, DEV))
        """,
    ),
    "a gradient that was computed in forward, in a chain, twice": (
        ("Counter", "grad_in_forward"),
        {"chain": True},
        """
        x1 = leaf(156, DEV)
        y2 = m0(x1)
        y3 = m1(y2)
        l4 = y3.sum() + (y2 * data(63, DEV)).sum() + (y2 * data(619, DEV)).sum()
        l4.backward(retain_graph=True)
        l4.backward()
        see('x1.grad', x1.grad)
        """,
    ),
    "one of two results that share memory is edited": (
        ("with_turned",),
        {},
        """
        x1 = leaf(790, DEV)
        y2, y3 = m0(x1)
        y3.relu_()
        l4 = y2.sum() + y3.t().square().sum() + (y3 * data(719, DEV)).sum()
        l4.backward()
        see('x1.grad', x1.grad)
        """,
    ),
    "an array keeps the values of its call": (
        ("twice",),
        {},
        """
        y1 = m0(leaf(1, DEV))
        keep('exported', y1.detach().numpy(force=True))
        y1.sum().backward()
        y2 = m0(leaf(2, DEV))
        """,
    ),
    "DLPack keeps the values of its call": (
        ("twice",),
        {},
        """
        y1 = m0(leaf(1, DEV))
        keep('exported', torch.from_dlpack(y1.detach()))
        y1.sum().backward()
        y2 = m0(leaf(2, DEV))
        """,
    ),
    "a parameter where none was": (
        ("NoBias",),
        {},
        """
        o0.bias = nn.Parameter(data(5, DEV, 4))
        see('y', m0(leaf(1, DEV)))
        """,
    ),
    "an attribute that forward reads": (
        ("Attribute",),
        {},
        """
        o0.flags['shift'] = False
        see('y', m0(leaf(1, DEV)))
        """,
    ),
    "the momentum of BatchNorm": (
        ("Norms",),
        {},
        """
        o0.batch.momentum = 0.5
        y1 = m0(leaf(131, DEV))
        see('mean', o0.batch.running_mean)
        """,
    ),
    "the default dtype": (
        ("third",),
        {},
        """
        torch.set_default_dtype(torch.float64)
        see('y', m0(leaf(958, DEV)))
        """,
    ),
    "a hook on a result from which another one is computed": (
        ("Scores",),
        {},
        """
        x1 = leaf(4, DEV)
        y2, y3 = m0(x1)
        y3.register_hook(lambda g: g * 2)
        (y2 * y2).sum().backward()
        see('x1.grad', x1.grad)
        grads('o0', o0)
        """,
    ),
    "retain_grad on a result from which another one is computed": (
        ("Scores",),
        {},
        """
        y1, y2 = m0(leaf(4, DEV))
        y2.retain_grad()
        (y1 * y1).sum().backward()
        see('y2.grad', y2.grad)
        """,
    ),
    "the hook before an input that gets no gradient": (
        ("ReturnsParameter",),
        {"max_in_flight": 2},
        """
        x1 = leaf(348, DEV)
        x1.register_hook(lambda g: see('hook', g))
        y2, y3 = m0(x1 * 3)
        y4, y5 = m0(y3)
        (y5 * y5).sum().backward()
        see('x1.grad', x1.grad)
        """,
    ),
    "hooks below a result that gets no gradient": (
        ("TwoOfTwo", "Same"),
        {},
        """
        o0.q.register_post_accumulate_grad_hook(lambda p: see('post hook', p.grad))
        x1 = leaf(4, DEV) * 2
        x1.register_hook(lambda g: see('x1 hook', g))
        x2 = leaf(5, DEV)
        o1.register_full_backward_hook(lambda module, gi, go: see('o1 backward hook', go[0]))
        y3, y4 = m0(x1, x2)
        y5 = o1(y4)
        see('grad', torch.autograd.grad((y3 * y3).sum() + (y5 * y5).sum(), [x1, y3], retain_graph=True)[0])
        (y5 * y5).sum().backward()
        see('x2.grad', x2.grad)
        """,
    ),
    "two threads, each with a callable of one capture": (
        ("Same", "Table"),
        {"max_in_flight": 3},
        """
        def work1():
            for i in range(20):
                x2 = leaf(i, DEV); y3 = m0(x2); (y3 * y3).sum().backward(); see('x2.grad', x2.grad)
        def work4():
            for i in range(20):
                x5 = leaf(i, DEV); y6 = m1(x5); (y6 * y6).sum().backward(); see('x5.grad', x5.grad)
        in_threads(work1, work4)
        """,
    ),
    "a chain through a view of a transposed result": (
        ("masked", "transposed", "flat_view", "Convolution"),
        {"chain": True},
        """
        x1 = leaf(4, DEV)
        y2, y3 = m0(x1)
        y4 = m3(m2(m1(y2)))
        see('y4', y4)
        (y4 * y4).sum().backward()
        see('x1.grad', x1.grad)
        grads('o3', o3)
        """,
    ),
}


# These may end with a refusal: what changed, or what cannot be served, is named.
MAY_BE_REFUSED = {
    "an array keeps the values of its call",
    "DLPack keeps the values of its call",
    "a parameter where none was",
    "an attribute that forward reads",
    "the momentum of BatchNorm",
    "the default dtype",
    "a hook on a result from which another one is computed",
    "retain_grad on a result from which another one is computed",
}


def regression(name: str, device: str) -> Program:
    """The program of ``REGRESSIONS`` of this name."""
    names, options, lines = REGRESSIONS[name]
    early, _, late = textwrap.dedent(lines).strip().rpartition("---\n")
    steps = [Step(early, "lines before", is_early=True)] if early else []
    pieces = tuple(Piece(i, kind, i + 1, is_exact=ZOO[kind].exact) for i, kind in enumerate(names))
    group = Group(tuple(range(len(names))), tuple(options.items()))
    is_exact = all(ZOO[kind].exact for kind in names)
    return Program(1, device, is_exact, pieces, (group,), (*steps, Step(late, "lines")))
