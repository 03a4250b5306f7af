"""The demo names scripts that exist, and says so when one of them fails."""

from haiku_posteriors.scripts import demo


def test_every_method_is_a_script():
    assert demo.REFERENCE in demo.METHODS
    for script, *_ in demo.METHODS.values():
        assert (demo.SCRIPTS / script).is_file()


def test_a_method_that_fails_is_told_and_the_others_compared(tmp_path, monkeypatch, capsys):
    for name, code in (("good.py", 0), ("bad.py", 2), ("compare_posteriors.py", 0)):
        content = "import sys, pathlib\npathlib.Path(__file__ + '.out').write_text(str(sys.argv))\n"
        (tmp_path / name).write_text(content + f"sys.exit({code})\n")
    monkeypatch.setattr(demo, "SCRIPTS", tmp_path)
    methods = {"hmc": ("good.py",), "vi": ("bad.py",), "sgd": ("good.py", "--flag")}
    monkeypatch.setattr(demo, "METHODS", methods)
    assert not demo.run_all(tmp_path / "runs")
    out = capsys.readouterr().out
    assert "hmc: done" in out and "vi: FAILED with exit code 2" in out and "sgd: done" in out
    compared = (tmp_path / "compare_posteriors.py.out").read_text()
    assert f"--candidates={tmp_path / 'runs' / 'sgd'}'" in compared
