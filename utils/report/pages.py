"""Tables for terminals, files and pages, and one HTML page with its pictures inside."""

import base64
import csv
import html
import io
import math
import pathlib
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.core.judging.floors import is_at_floor
from haiku_posteriors.utils.files import write_text
from haiku_posteriors.utils.plots import style

Results = Mapping[str, Mapping[str, Estimate]]  # by the run's name, then by the number's

CSS_DOTS_PER_INCH = 96
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; padding: 1rem;
       max-width: 78rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p, li { max-width: 46rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid #ddd;
         white-space: nowrap; vertical-align: top; }
th:first-child { text-align: left; position: sticky; left: 0; background: #fff;
                 white-space: normal; min-width: 7rem; }
thead th { border-bottom: 2px solid #888; vertical-align: bottom; }
td small { display: block; color: #666; }
td.near { background: #e3f1e6; }
.warning { border-left: 4px solid #d55e00; padding-left: 1.8rem; }
figure { margin: 1.5rem 0; overflow-x: auto; }
figure img { max-width: min(100%, 60rem); height: auto; }
figcaption { color: #444; font-size: .9rem; max-width: 46rem; }
@media (max-width: 40rem) { body { padding: .6rem; font-size: 15px; }
  th, td { padding: .25rem .4rem; }
  figure img { min-width: 30rem; } }
"""


def show_number(value: float, error: float = math.nan) -> str:
    """A number to the digits that its error leaves it: `0.126 ± 0.004`; a dash for none."""
    if math.isnan(value):
        return "-"
    if not (math.isfinite(error) and error > 0 and math.isfinite(value)):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    digits = min(6, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def text_table(results: Results, labels: Mapping[str, str], style: str) -> str:
    """Numbers down, runs across, each with its error, and with its floor in brackets.

    Args:
      results: the numbers of each run.
      labels: what the numbers are called, in the order of the lines; those of no run are left out.
      style: of `tabulate`, such as "simple" or "github".
    """

    def cell(estimate: Estimate) -> str:
        floor = "" if math.isnan(estimate.floor) else f" [{show_number(estimate.floor)}]"
        return show_number(estimate.value, estimate.error) + floor

    lines = [
        [label, *(cell(run.get(key, Estimate(math.nan))) for run in results.values())]
        for key, label in labels.items()
        if any(key in run for run in results.values())
    ]
    align = ("left", *("right" for _ in results))
    return tabulate(lines, ["", *results], tablefmt=style, disable_numparse=True, colalign=align)


def html_table(results: Results, labels: Mapping[str, str]) -> str:
    """As `text_table`; distances at their floor have a green ground."""

    def cell(key: str, run: Mapping[str, Estimate]) -> str:
        estimate = run.get(key, Estimate(math.nan))
        text = html.escape(show_number(estimate.value, estimate.error))
        if math.isnan(estimate.floor):
            return f"<td>{text}</td>"
        floor = show_number(estimate.floor, estimate.floor_error)
        kind = ' class="near"' if is_at_floor(key, estimate) else ""
        return f"<td{kind}>{text}<small>floor {floor}</small></td>"

    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *results))
    body = "\n".join(
        f"<tr><th>{html.escape(label)}</th>"
        + "".join(cell(key, run) for run in results.values())
        + "</tr>"
        for key, label in labels.items()
        if any(key in run for run in results.values())
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def html_picture(path: pathlib.Path, caption: str) -> str:
    """The picture itself, inside the page, so large that its letters are of the page's size."""
    content = path.read_bytes()
    data, text = base64.b64encode(content).decode(), html.escape(caption)
    width = int.from_bytes(content[16:20], "big")  # where a PNG file has it
    width = round(width * CSS_DOTS_PER_INCH / style.DOTS_PER_INCH)
    return (
        f'<figure><img alt="{text}" width="{width}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def html_list(sentences: Sequence[str], kind: str = "") -> str:
    """A list of sentences; `kind` "warning" asks for attention."""
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{kind}">{items}</ul>' if sentences else ""


def write_html(path: pathlib.Path, title: str, sections: Mapping[str, str]) -> None:
    """Writes a page that needs no other file; sections are HTML by their heading, "" for none."""
    body = "\n".join(
        (f"<h2>{html.escape(heading)}</h2>\n" if heading else "") + content
        for heading, content in sections.items()
        if content
    )
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    write_text(path, page)


def write_markdown(path: pathlib.Path, results: Results, labels: Mapping[str, str]) -> None:
    """The table of `text_table` for a page of documentation."""
    write_text(path, text_table(results, labels, "github") + "\n")


def write_csv(path: pathlib.Path, results: Results) -> None:
    """One line per number, with the fields of `Estimate`; an unknown value is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["run", "metric", *Estimate._fields])
    for run, numbers in results.items():
        for metric, estimate in numbers.items():
            writer.writerow(
                [run, metric, *("" if math.isnan(value) else repr(value) for value in estimate)]
            )
    write_text(path, buffer.getvalue())
