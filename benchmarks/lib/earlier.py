"""Runs that are added to those of an earlier record, where one call cannot take as long as all of them."""

import argparse
import json
from pathlib import Path
from typing import Any

from lib.environment import environment
from lib.harness import describe, in_fresh_process

ENVIRONMENT = ("gpu", "torch", "commit", "dirty")


def add_append_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--append", type=Path, help="JSON of earlier runs, to which these are added")


def earlier_record(
    parser: argparse.ArgumentParser, options: argparse.Namespace, measured: dict[str, Any]
) -> dict[str, Any] | None:
    """What `--append` names, None where it was not given.

    Args:
        parser: Ends the program if it is no record of the same measurement.
        options: What it parsed.
        measured: What both records say of that, beside where they were made.
    """
    if options.append is None:
        return None
    where = in_fresh_process(environment, options.device, options.commit)
    here = {**{name: where[name] for name in ENVIRONMENT}, **measured}
    try:
        record = json.loads(options.append.read_text(encoding="utf-8"))
        different = [name for name in here if record[name] != here[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--append: expected results of this benchmark, got {options.append}: {describe(error)}")
    if different:
        got = ", ".join(f"{name} {record[name]} instead of {here[name]}" for name in different)
        parser.error(f"--append: expected results of the same measurement, got {got}")
    return record
