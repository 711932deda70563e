"""Markers that tests/conftest.py turns into others."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.one_of(3)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("number", range(7))
def test_sampled(device, number): pass

def test_other(): pass
"""


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("not gpu and not full", ["test_sampled[0-cpu]", "test_sampled[3-cpu]", "test_sampled[6-cpu]", "test_other"]),
        ("not gpu", [*(f"test_sampled[{number}-cpu]" for number in range(7)), "test_other"]),
        ("gpu and not full", [f"test_sampled[{number}-cuda]" for number in range(7)]),
    ],
)
def test_one_of_n_is_for_make_test(pytester, request, expression, names):
    pytester.makeconftest((request.config.rootpath / "tests" / "conftest.py").read_text())
    pytester.makepyprojecttoml((request.config.rootpath / "pyproject.toml").read_text())
    pytester.makepyfile(TESTS)
    pytester.syspathinsert(request.config.rootpath / "tests" / "helpers")
    lines = pytester.runpytest_inprocess("--collect-only", "-q", "-m", expression).outlines
    assert sorted(line.partition("::")[2] for line in lines if "::" in line) == sorted(names)
