"""Shapes of tensors stand in comments: beside each parameter of a C++ function or in the comment directly above it,
and in the docstrings of public Python functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for area in ("common", "multi_tensor", "collectives", "fp8")
    for path in sorted((ROOT / "csrc" / area).iterdir())
    if path.suffix in (".h", ".cpp")
]
MODULES = [
    path for area in ("multi_tensor", "collectives", "fp8") for path in sorted((ROOT / "te_graph" / area).glob("*.py"))
]
TENSOR = r"(?:at::Tensor|at::TensorList|TensorList|MaybeTensor|Optional|variable_list|Plan::Tensors|Tensors)\b"
# From the start of a line to the parenthesis: a type or none, and a name. Neither calls in expressions nor returns.
HEADER = re.compile(
    r"^ {0,8}(?!return |throw |using |else |for |if |while |new )((?:[\w:<>,*&\[\]]+ )*?)([\w:~]+)\(", re.M
)
RETURNED = re.compile(rf"(?:^|[ <]){TENSOR}")
PARAMETER = re.compile(rf"{TENSOR}>*[&*]* (\w+)$")


def functions_in(text: str) -> Iterator[tuple[str, str, list[str], str]]:
    """Name, type, parameters' lines with their comments, and the comment directly above, of each C++ function."""
    code = re.sub(r"//[^\n]*", lambda hit: " " * len(hit.group()), text)
    for header in HEADER.finditer(code):
        end, depth = header.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        inside = code[header.end() : end - 1]
        # What is declared or defined; a call with a lambda, or a variable that is made of values, is neither.
        is_call = "{" in inside.replace("{}", "") or inside.lstrip().startswith('"')
        if is_call or not re.match(r"\s*(?:const\b|override\b|noexcept\b|[{;:])", code[end:]):
            continue
        above: list[str] = []
        for line in reversed(text[: header.start()].splitlines()):
            if line.lstrip().startswith("//"):
                above.append(line)
            elif not line.startswith("template <"):
                break
        last_line = text[header.start() : text.find("\n", end)]
        yield header[2], header[1], last_line.splitlines(), "\n".join(above)


def without_shape(text: str, header: str = "") -> list[str]:
    """Tensors of a C++ file's functions whose shape is told neither there nor at the declaration in its header, as
    ``function(parameter)``, or ``function() ->`` where only the result is one."""
    told: dict[str, set[str]] = {}
    missing = []
    functions = [(False, *function) for function in functions_in(header)]
    for is_own, name, returned, lines, above in functions + [(True, *function) for function in functions_in(text)]:
        words = told.setdefault(name.rpartition("::")[2], set())
        for comment in [above, *(line for line in lines if "// " in line)]:
            if "[" in comment:
                words |= {"->", *re.findall(r"\w+", comment)}
        code = re.sub(r"//[^\n]*", "", "\n".join(lines)).partition("(")[2]
        named = [hit[1] for part in re.split(r"[,)]\s*", code) if (hit := PARAMETER.search(part.partition(" =")[0]))]
        missing += [f"{name}({parameter})" for parameter in named if is_own and parameter not in words]
        if is_own and RETURNED.search(returned) and not named and "->" not in words:
            missing.append(f"{name}() ->")
    return missing


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "csrc")))
def test_shapes_stand_beside_tensors(path: Path) -> None:
    header = path.with_suffix(".h")
    assert without_shape(path.read_text(), header.read_text() if path != header and header.exists() else "") == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "te_graph")))
def test_docstrings_tell_shapes(path: Path) -> None:
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    missing = []
    for function in functions:
        given = [ast.unparse(argument.annotation) for argument in function.args.args if argument.annotation]
        is_public = not function.name.startswith("_") and not function.decorator_list
        head = "\n".join(text.splitlines()[function.lineno - 1 : function.body[0].end_lineno])
        if is_public and re.search(r"\bTensor\b", " ".join(given)) and not re.search(r"(?<![\w])\[[\w., *]*\]", head):
            missing.append(function.name)
    assert missing == []
