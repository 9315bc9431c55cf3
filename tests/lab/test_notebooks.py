"""Notebooks as people run them: what goes in, what counts as a success, what a failure says."""

from __future__ import annotations

import enum
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import nbformat
import numpy as np
import pytest

from revise_lab.errors import ConfigError, NotebookFailed, ResultsError
from revise_lab.lab.notebooks import run_notebook
from revise_lab.lab.template import check_parameters, declared, lint, parameters, plain

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
PARAMETERS = """\
profile: str = "smoke"  # smoke | quick | paper
config: str = "toy"  # name or path of a config
seed: int | None = None  # None: the one of the config
results_dir: str = "results"  # where runs go
n_jobs: int = 1  # cells at once"""


def notebook(path, *code, head="x = 1", tag="parameters", **meta):
    cells = [nbformat.v4.new_code_cell(head, id="0", metadata={"tags": [tag]})]
    cells += [nbformat.v4.new_code_cell(source, id=str(n)) for n, source in enumerate(code, 1)]
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec, **meta}), path)
    return path


# --- parameters


def test_no_tagged_cell_is_refused_before_anything_runs(tmp_path):
    path = notebook(tmp_path / "n.ipynb", "print(x)", tag="other")
    with pytest.raises(
        ConfigError, match=r"'n\.ipynb' has no cell tagged 'parameters'.*it would run with its own defaults"
    ):
        run_notebook(path, tmp_path / "out", {"x": 5})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"X": 5}, "'n.ipynb' has no parameter 'X'; did you mean 'x'?"),
        ({"profil": "quick"}, "has no parameter 'profil'; did you mean 'profile'?"),
        ({"my-param": 1}, "has no parameter 'my-param'; it has x, text, profile, must"),
        ({"x": 1}, "needs a value for 'must', which has no default"),
        ({"must": 1, "profile": 3}, "parameter 'profile' is 3, but it is declared str (smoke | quick | paper)"),
        ({"must": True}, "parameter 'must' is True, but it is declared int"),
    ],
)
def test_wrong_names_and_types_are_errors_with_the_remedy(tmp_path, given, message):
    head = 'x = 1\ntext = "a=b"\nprofile: str = "smoke"  # smoke | quick | paper\nmust: int'
    path = notebook(tmp_path / "n.ipynb", head=head)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_parameters(path, given)


def test_parameters_are_read_by_syntax_not_by_guessing(tmp_path):
    head = 's = "a=b"  # with = inside\nt: list[int] = [1, 2]  # a # b\nu: int | None = None'
    found = parameters(notebook(tmp_path / "n.ipynb", head=head))
    assert list(found) == ["s", "t", "u"]
    assert found["s"] == ("s", "", "with = inside", "'a=b'")
    assert found["t"].kind == "list[int]"
    assert check_parameters(tmp_path / "n.ipynb", {"s": "c=d", "u": None}) == {"s": "c=d", "u": None}


def test_numbers_of_numpy_and_tuples_become_plain():
    class Policy(enum.StrEnum):
        REVISE = "revise"

    given = {
        "i": np.int64(3), "f": np.float32(0.5), "g": np.float64(0.1), "b": np.bool_(False), "t": (1, (2, np.int8(3))),
        "s": Policy.REVISE, "n": None, "d": {"grid.load": (0.7, np.float64(1.0))},
    }  # fmt: skip
    result = plain(given)
    assert result == {
        "i": 3, "f": 0.5, "g": 0.1, "b": False, "t": [1, [2, 3]], "s": "revise", "n": None, "d": {"grid.load": [0.7, 1.0]},
    }  # fmt: skip
    assert json.loads(json.dumps(result)) == result
    assert [type(result[key]) for key in "ifgbs"] == [int, float, float, bool, str]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, "parameter 'p' is a set, which a notebook cannot be given; pass sorted(...)"),
        (Path("a"), "parameter 'p' is a PosixPath, which a notebook cannot be given; pass str(...)"),
        (date(2026, 1, 1), "parameter 'p' is a date, which a notebook cannot be given; pass str(...)"),
        (b"a", "parameter 'p' is a bytes"),
        ([1, {2}], "parameter 'p[1]' is a set"),
        ({1: "a"}, "parameter 'p' has the key 1, which would turn into text"),
        (float("nan"), "parameter 'p' is nan, which JSON cannot hold; pass None"),
        (np.array([1]), "parameter 'p' is a ndarray, which a notebook cannot be given; pass .tolist()"),
    ],
)
def test_what_would_arrive_changed_is_refused_by_name(value, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        plain(value, "p")


@pytest.mark.parametrize("text", ["", "{", '{"cells": 3}'])
def test_files_that_are_no_notebooks(tmp_path, text):
    (tmp_path / "n.ipynb").write_text(text)
    with pytest.raises(ConfigError, match=r"'n\.ipynb' is not a notebook"):
        parameters(tmp_path / "n.ipynb")
    with pytest.raises(ConfigError, match="there is no notebook"):
        parameters(tmp_path / "m.ipynb")


# --- runs: a kernel costs seconds, so the default part starts two and the rest is marked slow

ECHO = """\
import json, os, pathlib
for _ in range(20_000): print("x" * 99)
_ = pathlib.Path(out).write_text(json.dumps([x, text, nested, os.getcwd()]))"""


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """One success through awkward paths, with awkward values and two megabytes of output."""
    root = tmp_path_factory.mktemp("echo")
    head = 'x = 1\ntext: str = ""\nnested: dict = {}\nout: str = ""'
    path = notebook(root / "mit Leerzeichen" / "é {ü}.ipynb", ECHO, head=head)
    out = root / "results {1}" / "echo.json"
    given = {
        "x": np.int64(7),
        "text": "a=b 'q' \"d\" \\n\n{x} é",
        "nested": {"a": [None, True, 0.5, "true"]},
        "out": str(out),
    }
    before, lines = path.read_bytes(), []
    copy = run_notebook(path, out.parent, given, deliverables=("echo.json",), progress=lines.append)
    assert path.read_bytes() == before, "the template is never written to"
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"
    return {"given": given, "path": path, "out": out, "copy": copy, "lines": lines}


def test_values_arrive_unchanged_through_awkward_paths(echo):
    given = echo["given"]
    assert json.loads(echo["out"].read_text()) == [7, given["text"], given["nested"], str(echo["path"].parent)]
    assert echo["copy"] == echo["out"].parent / "notebook.ipynb"
    assert echo["lines"] == ["é {ü}: cell 1/2 x = 1", "é {ü}: cell 2/2 import json, os, pathlib"]


def test_chatty_output_is_kept_whole(echo):
    cell = nbformat.read(echo["copy"], as_version=4).cells[-1]
    assert sum(len(output.text) for output in cell.outputs) == 20_000 * 100


def test_executed_copy_opens_offline_and_tells_no_temporary_folder(echo):
    page = echo["copy"].with_name("notebook.html").read_text()
    assert not re.search(r"""(src|href)=["']https?://|import\(["']https?://""", page)
    text = echo["copy"].read_text()
    assert "rl-" not in text
    assert '"input_path": "é {ü}.ipynb"' in text


def failure(root, name, *code, **options):
    path = notebook(root / "notebooks" / f"{name}.ipynb", *code)
    with pytest.raises(NotebookFailed) as caught:
        run_notebook(path, root / name, {"x": 5}, **options)
    kept = sorted(file.name for file in (root / name).glob("notebook*"))
    assert kept == ["notebook.failed.html", "notebook.failed.ipynb"]
    assert caught.value.copy == root / name / "notebook.failed.ipynb"
    return str(caught.value)


@pytest.mark.slow
def test_a_dead_kernel_fails_the_run_at_its_cell(tmp_path):
    message = failure(tmp_path, "dead", "import os; os._exit(3)", "z = 2")
    assert message.startswith(
        "notebook 'dead': its kernel died in cell 2 (`import os; os._exit(3)`); see notebook.failed"
    )


@pytest.mark.slow
def test_a_hanging_cell_is_stopped(tmp_path):
    message = failure(tmp_path, "hang", "z = 2", "while True: pass", "z = 2", timeout_s=3)
    assert "cell 3 (`while True: pass`) had not finished after 3 s, the limit for this profile" in message


@pytest.mark.slow
def test_the_limit_holds_for_all_cells_together(tmp_path):
    message = failure(tmp_path, "slow", *["import time; time.sleep(2.5)"] * 9, timeout_s=6)
    assert re.search(r"cell \d+ \(`import time.*had not finished after 6 s", message)


@pytest.mark.slow
def test_an_error_and_an_exit_name_their_cell(tmp_path):
    assert "cell 3 (`1 / 0`) raised ZeroDivisionError: division by zero" in failure(
        tmp_path, "error", "y = 1", "1 / 0", "z"
    )
    said = failure(tmp_path, "exit", "import sys; sys.exit(0)", "z = 2")
    assert "cell 2 (`import sys; sys.exit(0)`) called sys.exit, so the cells after it never ran" in said


@pytest.mark.slow
def test_a_success_without_its_deliverables_is_a_failure(tmp_path):
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "empty.txt").touch()
    (tmp_path / "silent" / "old.csv").write_text("a")
    os.utime(tmp_path / "silent" / "old.csv", (1e9, 1e9))
    wanted = ("figures/*.pdf", "values.json", "old.csv", "empty.txt")
    assert (
        "it ran to its end but did not write figures/*.pdf (missing), values.json (missing), old.csv (older than this run), "
        "empty.txt (empty)"
    ) in failure(tmp_path, "silent", "print('done')", deliverables=wanted)


@pytest.mark.slow
def test_four_at_once_do_not_meet(tmp_path):
    paths = [notebook(tmp_path / "notebooks" / f"n{n}.ipynb", f"assert x == {n}") for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda n: run_notebook(paths[n], tmp_path / str(n), {"x": n}), range(4)))
    assert [copy.parent.name for copy in copies] == list("0123")


@pytest.mark.slow
def test_a_kernel_that_does_not_start_is_tried_once_more(tmp_path):
    flaky = tmp_path / "python"
    flaky.write_text(f'#!/bin/sh\nif [ ! -e "{tmp_path}/tried" ]; then touch "{tmp_path}/tried"; exit 1; fi\n'
                     f'exec "{sys.executable}" "$@"\n')  # fmt: skip
    flaky.chmod(0o755)
    path = notebook(tmp_path / "notebooks" / "n.ipynb", "y = x")
    assert run_notebook(path, tmp_path / "out", python=str(flaky)).name == "notebook.ipynb"
    with pytest.raises(NotebookFailed, match="'n': its kernel did not start, twice"):
        run_notebook(path, tmp_path / "out", python="/bin/false")
    assert (tmp_path / "out" / "notebook.ipynb").exists(), "a failure does not take away the copy of a success"


def test_success_is_not_read_off_the_status_fields(tmp_path):
    """An interrupted notebook as papermill leaves it: every cell completed, no exception, the last one never ran."""
    from revise_lab.lab.notebooks import _judge

    path = notebook(tmp_path / "n.ipynb", "slow()", "save()")
    executed = nbformat.read(path, as_version=4)
    for number, cell in enumerate(executed.cells):
        cell.metadata["papermill"] = {"status": "completed", "exception": None}
        cell.execution_count = number + 1
    assert _judge(executed) is None
    executed.cells[2].execution_count = None
    assert _judge(executed) == "cell 3 (`save()`) never ran"
    error = nbformat.v4.new_output("error", ename="KeyboardInterrupt", evalue="", traceback=[])
    executed.cells[1].outputs = [error]
    assert _judge(executed) == "cell 2 (`slow()`) raised KeyboardInterrupt: "


def test_copies_never_go_beside_the_notebook(tmp_path):
    path = notebook(tmp_path / "notebooks" / "n.ipynb")
    for folder in (path.parent, path.parent / "out"):
        with pytest.raises(ConfigError, match="executed copies go to a results folder, not beside the notebook"):
            run_notebook(path, folder)


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(ResultsError, match=r"cannot write .*runs.* pass another results_dir"):
        run_notebook(notebook(tmp_path / "notebooks" / "n.ipynb"), tmp_path / "runs" / "toy")


# --- templates


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_our_notebooks_are_good_templates(path):
    assert lint(path) == []


def test_a_good_template_has_no_findings(tmp_path):
    path = notebook(tmp_path / "n.ipynb", "y = n_jobs * 2", head=PARAMETERS, revise_lab={"budget_s": {"smoke": 60}})
    assert lint(path) == []
    assert declared(path) == ((), {"smoke": 60, "quick": 1200.0, "paper": 86400.0})


@pytest.mark.parametrize(
    ("code", "head", "finding"),
    [
        (
            [],
            PARAMETERS + "\nhalf: int = n_jobs // 2  # derived",
            "holds `half: int = n_jobs // 2`: only literal values",
        ),
        ([], PARAMETERS + "\nprint(seed)", "the parameters cell holds `print(seed)`"),
        ([], PARAMETERS.replace("  # cells at once", ""), "parameter 'n_jobs' has no help"),
        ([], PARAMETERS.replace("n_jobs: int", "n_jobs"), "parameter 'n_jobs' has no annotation"),
        ([], PARAMETERS.replace("n_jobs", "jobs"), "the parameters cell lacks 'n_jobs'"),
        (["%pip install x"], PARAMETERS, "cell 2 installs packages"),
        (["open('/home/me/x')"], PARAMETERS, "cell 2 holds an absolute path"),
        (["import os; os.chdir('..')"], PARAMETERS, "cell 2 changes the working folder"),
        (["\n".join("abcdefghijklmnop")], PARAMETERS, "cell 2 has 16 lines, more than 15"),
        (["a"] * 12, PARAMETERS, "it has 13 cells, more than 12"),
    ],
)
def test_findings_of_the_linter(tmp_path, code, head, finding):
    found = lint(notebook(tmp_path / "n.ipynb", *code, head=head))
    assert len(found) == 1
    assert finding in found[0]


def test_the_linter_sees_outputs_metadata_and_another_kernel(tmp_path):
    path = notebook(tmp_path / "n.ipynb", "y = 1", head=PARAMETERS, papermill={"duration": 3})
    one = nbformat.read(path, as_version=4)
    one.cells[1].execution_count = 4
    one.metadata.kernelspec.name = "my-env"
    nbformat.write(one, path)
    assert lint(path) == [
        "the kernelspec is not python3",
        "it carries papermill metadata: strip it",
        "cell 2 has outputs: strip them",
    ]
