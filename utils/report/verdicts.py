"""A verdict in the terminal and in diagnostics.json, in one form for all methods."""

import pathlib
from collections.abc import Mapping
from typing import Any

from haiku_posteriors.core.judging.diagnostics import Verdict
from haiku_posteriors.utils.files import write_json


def as_content(verdict: Verdict) -> dict[str, Any]:
    """The verdict as diagnostics.json has it."""
    return {
        "converged": verdict.converged,
        "problems": list(verdict.problems),
        "notes": list(verdict.notes),
    }


def tell(directory: pathlib.Path, verdict: Verdict, content: Mapping[str, Any]) -> None:
    """Writes diagnostics.json, with further `content`, and prints the verdict."""
    write_json(directory / "diagnostics.json", {**content, **as_content(verdict)})
    print("Verdict: converged." if verdict.converged else "Verdict: NOT converged.")
    for sentence in (*verdict.problems, *verdict.notes):
        print(f"- {sentence}")
