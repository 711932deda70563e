"""The areas of the code, common < multi_tensor < graphs < collectives < fp8 < flat < pipeline: what lies in one uses
what lies in it or to its left, in C++ and Python alike, and no modules import each other in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("common", "multi_tensor", "graphs", "collectives", "fp8", "flat", "pipeline")
ENDS = {"_C", "_build_config"}  # written by the build

Edges = dict[str, set[str]]


def circle_in(edges: Edges) -> list[str]:
    """Names of one circle, its first name again at the end; empty where there is none."""
    done: set[str] = set()
    for start in edges:
        path: list[str] = []
        stack = [(start, iter(sorted(edges[start])))]
        while stack:
            name, rest = stack[-1]
            if name not in path:
                path.append(name)
            following = next((one for one in rest if one in edges and one not in done), None)
            if following is None:
                done.add(name)
                path.pop()
                stack.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            else:
                stack.append((following, iter(sorted(edges[following]))))
    return []


def wrong_ways(edges: Edges, area_of: dict[str, str]) -> list[str]:
    """Edges that lead from an area to one on its right."""
    return [
        f"{name} uses {other}"
        for name, others in edges.items()
        for other in sorted(others)
        if area_of.get(name) in AREAS
        and area_of.get(other) in AREAS
        and AREAS.index(area_of[other]) > AREAS.index(area_of[name])
    ]


def imports_in(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Module and names of each import of te_graph's, those inside functions as well; type checkers' own do not run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "te_graph":
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names if alias.name.split(".")[0] == "te_graph")
        yield from imports_in(node)


def python_modules() -> dict[str, Path]:
    modules = {}
    for path in (ROOT / "te_graph").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def python_imports() -> Edges:
    modules = python_modules()
    edges: Edges = {name: set() for name in modules if name.rpartition(".")[2] not in ENDS}
    for name in edges:
        for module, names in imports_in(ast.parse(modules[name].read_text())):
            inner = {f"{module}.{one}" for one in names if f"{module}.{one}" in modules}
            # The package itself loads the extension before all else, and hands that on.
            edges[name] |= (inner or {module}) & edges.keys() - {name, "te_graph"}
    return edges


def python_area_of(names: Iterable[str]) -> dict[str, str]:
    return {name: (*name.split("."), "", "")[1] for name in names}


def cpp_includes() -> Edges:
    paths = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
    names = {str(path.relative_to(ROOT / "csrc")): path for path in paths}
    return {
        name: set(re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)) & names.keys()
        for name, path in names.items()
    }


def cpp_area_of(names: Iterable[str]) -> dict[str, str]:
    return {name: name.split("/")[0] for name in names}


def test_python_modules_import_no_area_on_their_right():
    edges = python_imports()
    assert len(edges) > 60
    assert wrong_ways(edges, python_area_of(edges)) == []


def test_packages_of_graphs_import_none_that_comes_later():
    packages = ("arguments", "tracing", "guards", "capture", "callables", "functions", "layers")

    def rank_of(name: str) -> int:
        package = (*name.split("."), "", "", "")[2] if name.startswith("te_graph.graphs.") else ""
        return packages.index(package) if package in packages else -1

    edges = python_imports()
    assert {rank_of(name) for name in edges} == {-1, *range(len(packages))}
    later = [(name, other) for name in edges for other in edges[name] if rank_of(other) > rank_of(name) > -1]
    assert later == []


def test_python_modules_import_each_other_in_no_circle():
    assert circle_in(python_imports()) == []


def test_every_python_module_but_those_on_top_lies_in_an_area():
    on_top = {"", "__main__", "_build", "report", "tensor_parallel", "testing"}
    assert set(python_area_of(python_imports()).values()) <= on_top | set(AREAS)


def test_cpp_files_include_no_area_on_their_right():
    edges = cpp_includes()
    assert len(edges) > 80
    assert wrong_ways(edges, cpp_area_of(edges)) == []


def test_headers_include_each_other_in_no_circle():
    assert circle_in(cpp_includes()) == []


def test_every_cpp_file_but_the_library_lies_in_an_area():
    assert set(cpp_area_of(cpp_includes()).values()) <= {"library.cpp", *AREAS}


@pytest.mark.parametrize(
    ("edges", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, ["a", "b", "a"]),
        ({"a": {"a"}}, ["a", "a"]),
    ],
)
def test_a_circle_is_found_where_there_is_one(edges, circle):
    assert circle_in(edges) == circle


def test_a_way_to_the_right_is_found():
    edges = {"common/a.h": {"fp8/b.h"}, "fp8/b.h": {"common/a.h"}}
    assert wrong_ways(edges, cpp_area_of(edges)) == ["common/a.h uses fp8/b.h"]


def test_the_drawing_of_the_design_has_the_areas_in_this_order():
    (drawing,) = re.findall(r"^(common < .*)$", (ROOT / "docs" / "design" / "overview.md").read_text(), re.MULTILINE)
    there = {path.name for path in (ROOT / "te_graph").iterdir() if path.is_dir()}
    assert drawing.split(" < ") == [area for area in AREAS if area in there]
