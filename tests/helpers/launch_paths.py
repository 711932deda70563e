"""Which functions of ours a call passes from Python to the launch of a kernel, told by their text."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def body_of(file: str, function: str) -> str:
    """The code of a function: in Python without its documentation, in C++ from its name to a brace below its start."""
    text = (ROOT / file).read_text()
    if file.endswith(".py"):
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        (found,) = [node for node in nodes if node.name == function]
        documented = ast.get_docstring(found) is not None
        return "\n".join(ast.unparse(node) for node in found.body[documented:])
    (start,) = re.finditer(rf"^( *)[\w:<>,*&][\w:<>,*& ]* (?:\w+::)?{function}\([^;{{]*\{{$", text, re.MULTILINE)
    end = re.compile(rf"^{start[1]}\}}", re.MULTILINE).search(text, start.end())
    return text[start.end() : end.start()]


def names_of(file: str, function: str) -> set[str]:
    """By what a function is called: its name, and those of the ops that it implements, without their overloads."""
    if file.endswith(".py"):
        return {function}
    text = (ROOT / file).read_text()
    constants = dict(re.findall(r'constexpr const char\* (\w+) = "([^"]+)";', text))
    ops = re.findall(rf'm\.impl\("?([\w.]+)"?, {function}\);', text)
    return {function, *(constants.get(op, op).partition(".")[0] for op in ops)}


def is_called(body: str, file: str, function: str) -> bool:
    """Whether ``body`` calls the function, a launcher maybe by what it has in common with the CPU loop."""
    shared = rf"TE_GRAPH_RUN\([^;]*, {function.removeprefix('launch_')}, "
    # Python holds ops in constants: _ALL_REDUCE_.
    names = "|".join(rf"\b_?{re.escape(name)}\b" for name in names_of(file, function))
    return re.search(shared, body) is not None or re.search(names, body, re.IGNORECASE) is not None


def is_launch(body: str) -> bool:
    launches = ("<<<", "cudaLaunchKernelEx(", "launch_dependent<", "launch_with_sums<", "cublasLtMatmul(")
    return any(launch in body for launch in launches)
