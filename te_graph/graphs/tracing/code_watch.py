"""Which Python functions run while a function is watched: those called by torch, by Python and by the user's code."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import inspect
import itertools
import os
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from te_graph.common.class_origins import module_of
from te_graph.common.dispatch import PACKAGE, TORCH, is_in_backward, is_project_file, is_user_file
from te_graph.graphs.tracing.code_names import is_making
from te_graph.graphs.tracing.extensions import classes_given, is_method_of_extension, is_of_extension
from te_graph.graphs.tracing.monitoring_tool import listen
from te_graph.graphs.tracing.names import (
    CODES_OF_FIELDS,
    CODES_OF_LOOKERS,
    is_implicit,
    is_of_compiler,
    is_users_module,
)
from te_graph.graphs.tracing.patches import NameWatch
from te_graph.graphs.tracing.source_lines import run_region, user_site
from te_graph.graphs.tracing.system_draws import (
    CODE_OF_SEED,
    FROM_SEED,
    StateWatch,
    called_through,
    is_draw_beside,
    is_of_state,
    unseen_draw,
)

_CALL = run_region.__code__  # below it runs what is watched
_CALLERS = os.path.join(PACKAGE, "graphs", "callables", "")
_ASIDE = ("<frozen importlib", typing.__file__)
_CALL_OF_ALIAS = typing._BaseGenericAlias.__call__.__code__  # ``C[int]()`` makes an object of C
_COMPILER, _COMPILED = os.path.join(TORCH, "_dynamo", "eval_frame.py"), "compile_wrapper"
_MAX_INSTANCES = 64  # of one piece of code: functions made anew for each object, and compared at each call
_MAX_STARTS = 64  # of one piece of code that are distinguished
_NO_INSTANCES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_LASTING = (type, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)


class CodeWatch:
    """Context that notes the code of every function that starts on this thread, or in a backward on any thread.

    What an import runs, or the making of a type for an annotation, is left out: it runs once. So is what the
    garbage collector runs, its callbacks and finalizers, which may be at any time.

    Args:
        aside: callables that are left out as well, with all that they call.

    Attributes:
        names: of attributes that the user's code asks for by ``getattr`` and the like.
        looks_at_all: the user's code called a function of Python's that reads whatever attributes there are, but for
            one that makes an object, of which ``Names`` tell what it looks at.
        field_readers: it called these of Python's, which go through the fields of a dataclass.
        calls_extensions: some code called a function of an extension module that is neither of torch nor of Python: no
            dispatcher need see what it does with tensors. Before Python 3.12 on this thread alone.
        read_whole: classes of objects of which functions of extension modules may read all attributes: their first
            argument, or that of the function of an installed package which calls them.
        drawn: from where some code first drew random numbers of which no generator's state tells, in words; None: from
            nowhere. Before Python 3.12 on this thread alone.
        states: sees of which generators code sets the state, likewise.
        runs_compiled: it called what ``torch.compile`` made of a function.
        missing: names of attributes that the user's code asked for, in whatever way, and that were not there. Before
            Python 3.12 on this thread alone, and not under a debugger.
        codes: it, by identity: equal code may be there twice, with other globals.
        variables: of such code of the user's as has variables of the function around it: what these held when it
            started, for each of its starts. They tell which of several functions it was.
        scopes: the globals that each of ``codes`` ran with first.
        looked_up: attributes that code of Python or torch asked for by ``getattr`` or ``hasattr``, and those that were
            not there for it as ``missing`` are for the user's: (class of the object, name).
        sees_all: so it is for all threads.
    """

    def __init__(self, aside: Iterable[Any] = ()) -> None:
        self.names: set[str] = set()
        self.looks_at_all = self.calls_extensions = False
        self.drawn: str | None = None
        self.states = StateWatch()
        self.field_readers: set[str] = set()
        self.missing: set[str] = set()
        self.looked_up: set[tuple[type, str]] = set()
        self.read_whole: set[type] = set()
        self.codes: dict[int, types.CodeType] = {}
        self.variables: dict[int, list[tuple]] = {}
        self.scopes: dict[int, dict[str, Any]] = {}
        self._thread = threading.get_ident()
        self._undo = contextlib.ExitStack()
        self._aside = {id(code): code for code in map(_code_of, (*gc.callbacks, *aside))}
        self._settled: set[int] = set()  # those of ``codes`` whose further starts tell nothing
        self._own: set[int] = set()  # those of ``codes`` that are of this package
        self._known_calls: dict[int, Any] = {}  # what was called and is of no extension module, and lives for long
        self._collects_on: int | None = None  # thread
        self.sees_all = False
        self._is_profiling = False

    def __enter__(self) -> CodeWatch:
        with contextlib.ExitStack() as stack:
            stack.enter_context(NameWatch(self._note_name, self._note_look))
            gc.callbacks.append(self._on_collection)
            stack.callback(gc.callbacks.remove, self._on_collection)
            stack.callback(self._monitored() if hasattr(sys, "monitoring") else self._profiled())
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        self._undo.close()

    @property
    def runs_compiled(self) -> bool:
        return any(code.co_name == _COMPILED and code.co_filename == _COMPILER for code in self.codes.values())

    def users_codes(self) -> Iterator[tuple[int, types.CodeType]]:
        """What the user wrote of ``codes``, or had made from text outside of installed packages."""
        for key, code in self.codes.items():
            scope = self.scopes[key]
            is_theirs = is_user_file(code.co_filename) and is_users_module(scope.get("__name__", ""))
            if is_theirs and (not is_generated(code) or is_project_file(scope.get("__file__") or "")):
                yield key, code

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        self._collects_on = threading.get_ident() if phase == "start" else None

    def _is_aside(self, frame: types.FrameType | None) -> bool:
        """True below what runs once, or at any time."""
        if self._collects_on == threading.get_ident():
            return True
        while frame is not None and frame.f_code is not _CALL:
            code = frame.f_code
            if id(code) in self._aside or (_is_aside_file(code.co_filename) and code is not _CALL_OF_ALIAS):
                return True
            frame = frame.f_back
        return False

    def _is_ours(self) -> bool:
        """Whether what happens on this thread belongs to what is watched."""
        return threading.get_ident() == self._thread or is_in_backward()

    def _note_name(self, name: str) -> None:
        if self._is_ours():
            self.names.add(name)

    def _note_look(self, obj: Any, name: str, frame: types.FrameType) -> None:
        """That the function of ``frame``, of a library, asks ``obj`` for an attribute."""
        look = (type(obj), name)
        if look in self.looked_up or issubclass(type(obj), _NO_INSTANCES) or _is_own(frame.f_code):
            return
        is_special = is_of_compiler(name) or is_implicit(name)
        if not is_special and self._is_ours() and not self._is_aside(frame):
            self.looked_up.add(look)

    def _note_error(self, frame: types.FrameType, error: BaseException) -> None:
        """Of an error that the function of ``frame`` sees."""
        name = error.name if isinstance(error, AttributeError) else None
        if not isinstance(name, str):
            return
        if not is_user_file(frame.f_code.co_filename):
            self._note_look(error.obj, name, frame)
        elif self._is_ours():
            self.missing.add(name)

    def _note_draw(self, name: str, frame: types.FrameType) -> None:
        """That the function of ``frame`` draws from what is called ``name``."""
        if self.drawn is None and not (self._is_aside(frame) or is_draw_beside(frame)):
            self.drawn = f"{name} at {user_site()}"

    def _note_call(self, function: Any, frame: types.FrameType, first: Any = None) -> None:
        """Of a call of what Python code did not write, by the function of ``frame``, with ``first`` as an argument."""
        called, given = called_through(function, first)
        if (name := unseen_draw(called, given)) is not None:
            self._note_draw(name, frame)
        if is_of_state(called) and not self._is_aside(frame):
            self.states.see(called, given)
        if type(function) is types.FunctionType or id(function) in self._known_calls:
            return
        is_function = is_of_extension(function)
        self.calls_extensions |= is_function
        if is_function or is_method_of_extension(function):
            is_passed_on = frame.f_code.co_argcount > 0 and not is_project_file(frame.f_code.co_filename)
            self.read_whole |= classes_given(self._first_argument(frame) if is_passed_on else first)
        elif isinstance(function, _LASTING):
            self._known_calls[id(function)] = function

    def _note(self, frame: types.FrameType) -> None:
        """Of a function that starts."""
        code = frame.f_code
        if id(code) in CODES_OF_LOOKERS and not self.looks_at_all:
            above = frame.f_back.f_code
            self.looks_at_all = is_user_file(above.co_filename) and not is_making(above)
        if id(code) in CODES_OF_FIELDS and is_user_file(frame.f_back.f_code.co_filename):
            self.field_readers.add(CODES_OF_FIELDS[id(code)])
        if code is CODE_OF_SEED and frame.f_locals.get("a") is None:
            self._note_draw(FROM_SEED, frame)
        has_variables = is_user_file(code.co_filename) and self._wants_variables(code)
        if _is_own(code):
            self._own.add(id(code))
        elif (id(code) in self.codes and not has_variables) or self._is_aside(frame) or _makes_library_tuple(frame):
            return
        self.codes[id(code)] = code
        self.scopes.setdefault(id(code), frame.f_globals)
        if not (has_variables or id(code) in CODES_OF_LOOKERS or id(code) in CODES_OF_FIELDS or code is CODE_OF_SEED):
            self._settled.add(id(code))
        if has_variables:
            held = frame.f_locals
            self._note_variables(code, held)
            self._let_go(held)

    def _let_go(self, held: Any) -> None:
        """Of the variables of a frame. Before Python 3.13 they are a copy, which would keep what the function lets go
        of. What a profile function leaves in it becomes the variables again."""
        if isinstance(held, dict) and not self._is_profiling:
            held.clear()

    def _first_argument(self, frame: types.FrameType) -> Any:
        held = frame.f_locals
        first = held.get(frame.f_code.co_varnames[0])
        self._let_go(held)
        return first

    def _wants_variables(self, code: types.CodeType) -> bool:
        """Whether it matters at each start of ``code`` what its variables hold."""
        return bool(code.co_freevars)

    def _note_variables(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        """Of ``code`` that starts with these ``variables``, its own and those of the function around it."""
        if code.co_freevars and len(starts := self.variables.setdefault(id(code), [])) < _MAX_STARTS:
            starts.append(tuple(variables.get(name) for name in code.co_freevars))

    def _monitored(self) -> Callable[[], None]:
        monitoring = sys.monitoring

        def note(code: types.CodeType, offset: int) -> object:
            if self._is_ours():
                self._note(sys._getframe(1))
            return monitoring.DISABLE if id(code) in self._settled else None

        def note_error(code: types.CodeType, offset: int, error: BaseException) -> None:
            self._note_error(sys._getframe(1), error)

        def note_call(code: types.CodeType, offset: int, function: Any, first: Any) -> object:
            if _is_own(code):
                return monitoring.DISABLE
            if type(function) is not types.FunctionType and self._is_ours():
                self._note_call(function, sys._getframe(1), first)
            return None

        events = monitoring.events
        stop = listen({events.PY_START: note, events.RAISE: note_error, events.CALL: note_call})
        self.sees_all = stop is not None
        return stop or self._profiled()

    def _profiled(self) -> Callable[[], None]:
        """Where Python has no events for many: of this thread alone."""
        outer = sys.getprofile()
        self._is_profiling = True

        def note(frame: types.FrameType, event: str, given: Any) -> None:
            if event == "call":
                if id(frame.f_code) not in self._settled:
                    self._note(frame)
            elif event == "c_call" and id(frame.f_code) not in self._own:
                self._note_call(given, frame)
            if callable(outer):
                outer(frame, event, given)

        def stop() -> None:
            sys.setprofile(outer if callable(outer) else None)
            if hasattr(outer, "enable"):  # a cProfile.Profile, which pauses meanwhile
                outer.enable()
            if sys.gettrace() == self._trace:
                sys.settrace(None)

        sys.setprofile(note)
        if sys.gettrace() is None:
            sys.settrace(self._trace)
        return stop

    def _trace(self, frame: types.FrameType, event: str, given: Any) -> Callable | None:
        """Where Python has no events for many: of errors on this thread, unless a debugger listens to them."""
        if event == "exception":
            self._note_error(frame, given[1])
        frame.f_trace_lines = False
        return self._trace if is_user_file(frame.f_code.co_filename) else None


@functools.lru_cache(maxsize=4096)
def _is_aside_file(filename: str) -> bool:
    return filename.startswith(_ASIDE)


def _is_own(code: types.CodeType) -> bool:
    """True for code of this package, but for that which calls what the user gave it."""
    return code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(_CALLERS) and code is not _CALL


def _code_of(callback: Any) -> types.CodeType | None:
    while isinstance(callback, functools.partial):
        callback = callback.func
    function = callback if hasattr(callback, "__code__") else type(callback).__call__
    return getattr(function, "__code__", None)


def _makes_library_tuple(frame: types.FrameType) -> bool:
    """True for ``__new__`` of a named tuple of torch's or Python's, which is compiled from text and has no file."""
    if not is_generated(frame.f_code) or not frame.f_globals.get("__name__", "").startswith("namedtuple_"):
        return False
    return not _is_of_users_module(frame.f_locals.get("_cls"))


def _is_of_users_module(kind: Any) -> bool:
    return isinstance(kind, type) and is_users_module(module_of(kind))


def is_generated(code: types.CodeType) -> bool:
    """True for code that was compiled from text, as the methods of dataclasses are."""
    return code.co_filename.startswith("<")


def _is_users(function: types.FunctionType) -> bool:
    return is_users_module(function.__globals__.get("__name__", ""))


def functions_of(
    watch: CodeWatch, known: Iterable[types.FunctionType], beside: Iterable[CodeWatch] = ()
) -> list[types.FunctionType]:
    """The functions of the user's that ``watch`` can have seen to run and that are not ``known``, as far as there are
    any at present. What the code around it ran to make is gone with the call, and made anew by the next one: also where
    one of the watches ``beside`` has seen that code, as that of a forward whose backward runs a hook."""
    by_code: dict[int, list[types.FunctionType]] = {}
    for function in known:
        by_code.setdefault(id(function.__code__), []).append(function)
    found: dict[int, list[types.FunctionType]] = {}
    unknown: list[types.CodeType] = []
    made = {id(inner) for one in (watch, *beside) for code in one.codes.values() for inner in code.co_consts}
    for key, code in watch.users_codes():
        if key in made or _are_all(by_code.get(key, []), code, watch.variables.get(key)):
            continue
        named = None if code.co_flags & inspect.CO_NESTED else _by_name(code, watch.scopes[key])
        found[key] = [] if named is None else [named]
        if named is None:
            unknown.append(code)
    for holder in gc.get_referrers(*unknown) if unknown else ():
        if isinstance(holder, types.FunctionType) and id(holder.__code__) in found and _is_users(holder):
            found[id(holder.__code__)].append(holder)
    kept = set(map(id, itertools.chain(*by_code.values())))
    ran = (one for key, functions in found.items() for one in _that_ran(functions, watch.variables.get(key)))
    return [function for function in ran if id(function) not in kept]


def too_many(functions: Iterable[types.FunctionType]) -> str:
    """Why ``functions``, which no place leads to, cannot be compared at each call; empty if they can."""
    counts = collections.Counter(function.__code__ for function in functions)
    code, count = next(iter(counts.most_common(1)), (None, 0))
    if count <= _MAX_INSTANCES:
        return ""
    return f"{count} functions {code.co_name} are more than can be compared: let a list or attribute hold them"


def _are_all(functions: list[types.FunctionType], code: types.CodeType, starts: list[tuple] | None) -> bool:
    """Whether no other function of ``code`` than ``functions`` can have run, or none that would differ from these."""
    if not functions or not code.co_flags & inspect.CO_NESTED:
        return bool(functions)  # what is written inside no function is made once
    if not code.co_freevars:
        return not (functions[0].__defaults__ or functions[0].__kwdefaults__)
    if not starts or len(starts) == _MAX_STARTS:
        return False
    return all(any(_shares(one, held) for one in functions) for held in starts)


def _by_name(code: types.CodeType, scope: dict[str, Any]) -> types.FunctionType | None:
    """The function of ``code``, where the name that it was given leads there."""
    first, *rest = getattr(code, "co_qualname", code.co_name).split(".")  # it is of Python 3.11 and newer
    found = scope.get(first)
    for name in rest:
        found = vars(found).get(name) if isinstance(found, type) else None
    parts = (found, getattr(found, "__func__", None), getattr(found, "fget", None))
    return next((one for one in parts if isinstance(one, types.FunctionType) and one.__code__ is code), None)


def _that_ran(functions: list[types.FunctionType], starts: list[tuple] | None) -> list[types.FunctionType]:
    """Those of ``functions``, of one code, that started with such variables as ``starts`` has; all if none did."""
    if len(functions) < 2 or not starts or len(starts) == _MAX_STARTS:
        return functions
    return [one for one in functions if any(_may_have_held(one, held) for held in starts)] or functions


def _may_have_held(function: types.FunctionType, held: tuple) -> bool:
    """Whether one of its variables is what it was, or all are plain values, which it may have counted on."""
    values = [*map(_content, function.__closure__), *held]
    return _shares(function, held) or not any(map(gc.is_tracked, values))


def _shares(function: types.FunctionType, held: tuple) -> bool:
    """Whether one of its variables is an object that other functions hardly have."""
    pairs = zip(map(_content, function.__closure__), held, strict=True)
    return any(one is other and gc.is_tracked(one) for one, other in pairs)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
