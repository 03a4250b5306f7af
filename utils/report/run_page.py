"""report.html of one run, and the line that list_runs.py has for it: both from its files alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.utils import files
from haiku_posteriors.utils.report import pages

CAPTIONS = {
    "prior_predictive.png": "What the prior says before it has seen the data.",
    "predictive.png": "Predictive distribution.",
    "surface.png": "Probability of the classes, and where the draws disagree.",
    "calibration.png": "Calibration on the test rows.",
    "reliability.png": "Calibration on the test rows.",
    "diagnostics.png": "What the chains say of themselves.",
    "sandwich.png": "Bounds of the ELBO from both sides.",
    "curves.png": "The way to the end.",
}
METRICS = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier score",
    "coverage_50": "coverage of 50 % intervals",
    "coverage_90": "coverage of 90 % intervals",
    "coverage_95": "coverage of 95 % intervals",
    "entropy": "entropy",
    "aleatoric": "aleatoric uncertainty",
    "epistemic": "epistemic uncertainty",
}
CONVERGENCE = {
    "largest_rhat": "largest R-hat",
    "median_rhat": "median R-hat",
    "smallest_bulk_ess": "least effective sample size, bulk",
    "smallest_tail_ess": "least effective sample size, tail",
}


class RunFacts(NamedTuple):
    """What a folder tells of its run.

    Attributes:
      path: the folder.
      flags: flags.json.
      summary: summary.json; empty before the end.
      diagnostics: diagnostics.json; empty for methods without chains, and before the end.
      step: the step of the newest checkpoint; 0 if there is none.
    """

    path: pathlib.Path
    flags: Mapping[str, Any]
    summary: Mapping[str, Any]
    diagnostics: Mapping[str, Any]
    step: int

    @property
    def state(self) -> str:
        """`finished`, or how far it has come."""
        if self.summary:
            return "finished"
        total = self.flags.get("num_iterations") or self.flags.get("num_epochs") or "?"
        return f"at {self.step} of {total}" if self.step else "begun"

    @property
    def verdict(self) -> str:
        """In a word or two; a dash where the method has none."""
        if "converged" not in self.diagnostics:
            return "-"
        return "converged" if self.diagnostics["converged"] else "NOT converged"


def read_facts(path: pathlib.Path) -> RunFacts:
    """The facts of a folder with flags.json.

    Raises:
      UserError: a file is damaged.
    """

    def optional(name: str) -> dict[str, Any]:
        return files.read_json(path / name) if (path / name).is_file() else {}

    steps = [file.stem.split("_")[1] for file in (path / "checkpoints").glob("epoch_*.safetensors")]
    return RunFacts(
        path,
        files.read_json(path / "flags.json"),
        optional("summary.json"),
        optional("diagnostics.json"),
        max((int(step) for step in steps if step.isdecimal()), default=0),
    )


def find_runs(root: pathlib.Path) -> list[pathlib.Path]:
    """The folders of runs at or below a folder, in the order of their names."""
    if not root.is_dir():
        raise UserError(f"There is no folder {root}.")
    return sorted(path.parent for path in root.rglob("flags.json"))


def list_line(path: pathlib.Path) -> list[str]:
    """State, method, data, network, metrics and verdict of a run; a damaged one says so."""
    try:
        facts = read_facts(path)
        test = facts.summary.get("test", {})
        shown = [
            f"{name} {pages.show_number(float(test[name]))}"
            for name in ("accuracy", "rmse", "nll")
            if test.get(name) is not None
        ]
        data = pathlib.Path(str(facts.flags.get("dataset_name", "-"))).name
        network = pathlib.Path(str(facts.flags.get("model_name", "-"))).name
        method = str(facts.flags.get("method", "-"))
        return [facts.state, method, data, network, ", ".join(shown) or "-", facts.verdict]
    except (UserError, TypeError, ValueError, AttributeError):
        return ["damaged", "-", "-", "-", "-", "-"]


def write(path: pathlib.Path) -> pathlib.Path:
    """Writes report.html into the folder of a finished run."""
    facts = read_facts(path)
    summary, diagnostics = facts.summary, facts.diagnostics
    pictures = [name for name in CAPTIONS if (path / name).is_file()]
    sections = {
        "": _verdict(diagnostics),
        "Refinement": _refinement(summary.get("refinement")),
        "Metrics": _metrics(summary),
        "Targets": _columns(summary.get("test_by_target", {}), METRICS),
        "Convergence": _columns(
            {
                name.replace("_", "-"): diagnostics[name]
                for name in ("predictions", "parameters", "log_joint")
                if name in diagnostics
            },
            CONVERGENCE,
        ),
        "Pictures": "\n".join(pages.html_picture(path / name, CAPTIONS[name]) for name in pictures),
        "What was run": pages.html_list(_what_was_run(facts)),
        "Flags": pages.html_list(_flags(facts.flags)),
    }
    title = f"{summary['method']}: {summary['model']} on {pathlib.Path(summary['dataset']).name}"
    pages.write_html(path / "report.html", title, sections)
    return path / "report.html"


def _verdict(diagnostics: Mapping[str, Any]) -> str:
    if "converged" not in diagnostics:
        return ""
    said = "Verdict: converged." if diagnostics["converged"] else "Verdict: NOT converged."
    problems: Sequence[str] = diagnostics.get("problems", ())
    notes: Sequence[str] = diagnostics.get("notes", ())
    return pages.html_list([said, *problems], "warning" if problems else "") + pages.html_list(
        notes
    )


def _refinement(facts: Mapping[str, Any] | None) -> str:
    """That the draws are not the method's own, and what is known of where they are."""
    if not facts:
        return ""
    moved = (
        f"Refined: every draw was moved by {facts['gradients_per_draw']:,} gradients "
        f"({facts['kind']}, step size {pages.show_number(facts['step_size'])}"
        f"{', output layer integrated out' if facts.get('collapse_output') else ''}); "
        f"{facts['gradients']:,} gradients in all."
    )
    shifts = [
        f"Exact transitions then change {name} by {found['value']:.3f} ± {found['error']:.3f} "
        "standard deviations."
        for name, found in facts.get("bias", {}).items()
    ]
    problems: Sequence[str] = facts["problems"]
    told = pages.html_list([moved, *shifts, *facts["notes"]])
    return told + (pages.html_list(problems, "warning") if problems else "")


def _metrics(summary: Mapping[str, Any]) -> str:
    parts = {
        "test": summary["test"],
        "train": summary["train"],
        # A draw alone has no epistemic uncertainty.
        "test, mean of draws": {
            name: value
            for name, value in summary["test_mean_of_members"].items()
            if name != "epistemic"
        },
    }
    return _columns(parts, METRICS)


def _columns(parts: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """A table with a column for each part; empty for none."""
    results = {
        part: {
            name: Estimate(float(value))
            for name, value in values.items()
            if name in labels and value is not None
        }
        for part, values in parts.items()
    }
    return pages.html_table(results, labels) if results else ""


def _what_was_run(facts: RunFacts) -> list[str]:
    summary = facts.summary
    device, versions, judged = summary["device"], summary["versions"], facts.diagnostics
    efficiency = []
    if "ess_per_1000_gradients" in judged:
        least = judged["ess_per_1000_gradients"] * judged["num_gradients"] / 1000
        efficiency = [
            f"{judged['num_gradients']:,} gradients after burn-in; least effective sample size of "
            f"predictions {pages.show_number(judged['ess_per_1000_gradients'])} per 1,000 of them, "
            f"{pages.show_number(least / summary['seconds'])} per second of the run."
        ]
    return [
        f"{summary['num_chains']} chain(s) or member(s), {summary['num_draws']} draws, "
        f"{summary['epochs']} steps of the loop, seed {summary['seed']}.",
        f"{summary['num_parameters']:,} parameters.",
        f"{summary['seconds']:.1f} s on {device['count']} {device['kind']} device(s), "
        f"{summary['peak_memory_bytes'] / 1e6:.0f} MB at most.",
        *efficiency,
        ", ".join(f"{package} {version}" for package, version in versions.items()) + ".",
        f"Data: {summary['dataset']}, SHA-256 {summary['data_sha256']}.",
    ]


def _flags(flags: Mapping[str, Any]) -> list[str]:
    return [
        f"--{name}={value}"
        for name, value in flags.items()
        if value not in (None, "", []) and name not in ("method", "data")
    ]
