"""Tables for terminals, files and pages."""

import numpy as np
import pytest

from haiku_posteriors.core.judging.bootstrap import Estimate
from haiku_posteriors.utils.report import pages


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.12614, 0.00374, "0.1261 ± 0.0037"),
        (12.345, 2.0, "12.3 ± 2.0"),
        (1600.0, np.nan, "1600"),
        (86.5249, np.nan, "86.52"),
        (123456.7, np.nan, "123457"),
        (np.nan, 0.1, "-"),
        (0.5, 0.0, "0.5"),
        (-np.inf, np.nan, "-inf"),
    ],
)
def test_numbers_have_the_digits_that_their_errors_leave(value, error, shown):
    assert pages.show_number(value, error) == shown


def test_tables_have_errors_floors_and_dashes(tmp_path):
    results = {
        "a<b>": {"w1": Estimate(0.5, 0.01, 0.1, 0.01), "nll": Estimate(1.25)},
        "c": {"w1": Estimate(0.11, 0.01, 0.1, 0.01)},
    }
    labels = {"nll": "NLL", "absent": "never", "w1": "W1"}
    text = pages.text_table(results, labels, "github")
    assert "0.500 ± 0.010 [0.1]" in text and "never" not in text and "| -" in text.replace("  ", "")
    page = pages.html_table(results, labels)
    assert "a&lt;b&gt;" in page and page.count('class="near"') == 1
    pages.write_csv(tmp_path / "t.csv", results)
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines == [
        "run,metric,value,error,floor,floor_error",
        "a<b>,w1,0.5,0.01,0.1,0.01",
        "a<b>,nll,1.25,,,",
        "c,w1,0.11,0.01,0.1,0.01",
    ]
