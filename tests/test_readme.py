"""The README's Python example runs as it stands there."""

import pathlib
import re

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def test_example_takes_a_haiku_function_and_arrays_to_draws_and_predictions(
    capsys, first_device_only
):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope = {}
    exec(example, scope)
    result = scope["result"]
    assert result.draws["mlp/~/linear_0"]["w"].shape == (4, 50, 1, 20)
    assert result.test_predictions.outputs.shape == (4, 50, 40, 2)
    # The noise has a standard deviation of 0.1 in the units of y.
    assert 0.08 < result.test_metrics["rmse"] < 0.15
    assert "rmse" in capsys.readouterr().out
    assert scope["info"]["accepted"][50:].mean() > 0.5
    assert scope["draws"]["mlp/~/linear_0"]["w"].shape == (1, 1, 20)
