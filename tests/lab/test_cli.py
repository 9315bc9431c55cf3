"""The command line: what it prints, what it leaves behind, and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest

from revise_lab.errors import ConfigError
from revise_lab.lab.cli import main
from revise_lab.serving.server import EmbeddedServer

HERE = Path(__file__).parent
CONFIG = """\
schema: 1
experiment: toy_lab.counting
seed: 7
grid:
  load: [0.5, 1.0]
  policy: [restart, revise]
tables: [toy]
profiles:
  paper:
    grid: {load: [0.5, 1.0, 1.5]}
"""
HEAD = """\
profile: str = "smoke"  # smoke | quick | paper
config: str = "toy"  # name or path of a config
overrides: dict = {}  # dotted path -> value
seed: int | None = None  # None: the one of the config
results_dir: str = "results"  # where runs go
n_jobs: int = 1  # cells at once"""
SWEEP = """\
from revise_lab import lab
chosen = lab.load(config, profile, overrides)
frame = lab.sweep(chosen, results_dir, n_jobs)"""
DELIVER = """\
run = lab.RunFolder.of(chosen, results_dir)
lab.save_table(frame.groupby("load", as_index=False)["tokens"].mean(), "toy", run.path / "tables")
run.write_values([{"id": "toy.cells", "value": frame["cell_id"].nunique()}])"""


def notebook(path, *code):
    path.parent.mkdir(exist_ok=True)
    cells = [nbformat.v4.new_markdown_cell(f"# {path.stem.title()}: for the tests", id="t")]
    cells += [nbformat.v4.new_code_cell(HEAD, id="p", metadata={"tags": ["parameters"]})]
    cells += [nbformat.v4.new_code_cell(source, id=str(n)) for n, source in enumerate(code)]
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec}), path)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A project of its own: configs, notebooks and results below the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setenv("REVISE_LAB_CONFIGS", str(tmp_path / "configs"))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "toy.yaml").write_text(CONFIG)
    (tmp_path / "results" / "reference").mkdir(parents=True)
    notebook(tmp_path / "notebooks" / "toy.ipynb", SWEEP, DELIVER)
    return tmp_path


def test_help_teaches(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "revise-lab reproduce revise_provenance --profile quick" in text
    assert re.search(r"quick +about 5 minutes for everything", text)
    for command in ("list", "reproduce", "scorecard", "verify", "doctor"):
        assert main([command, "--help"]) == 0
        assert "examples:" in capsys.readouterr().out


def test_our_own_emulation_is_not_measured(capsys):
    with EmbeddedServer() as server:
        assert main(["reproduce", "toy", "--endpoint", f"http://127.0.0.1:9/v1, {server.url}"]) == 2
    assert f"{server.url} is an emulation of ours, and results would call it measured" in capsys.readouterr().err


def test_list_names_what_there_is(capsys):
    assert main(["list"]) == 0
    assert re.search(r"^toy +notebook, config +Toy: for the tests$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "tow"], "no notebook or experiment is called 'tow'; did you mean 'toy'?"),
        (["reproduce", "toy", "--set", "grid.lod=[1.0]"], "grid.lod: no such parameter"),
        (["reproduce", "toy", "--set", "grid.load"], "override 'grid.load': write path=value"),
        (["reproduce", "toy", "--endpoint", "localhost"], "--endpoint is 'localhost', neither 'emulated' nor a URL"),
        (["reproduce", "toy", "--set", "source=measured"], "is not chosen; --endpoint URL makes them measured"),
        (["reproduce", "toy", "--profile", "fast"], "invalid choice: 'fast'"),
        (["reproduce", "toy", "--jobs", "0"], "must be a positive number, or -1 for one per core"),
        (["reproduce", "toy", "--set", "grid.load.x=[1.0]"], "override grid.load.x: the value of a parameter is whole"),
        (["reproduce", "toy", "--set", "grid=[]"], "override grid: an empty list leaves no cell"),
        (["explore", "late_read", "--jobs", "0"], "must be a positive number, or -1 for one per core"),
        (["explore", "late_read", "--audit", "-5"], "argument --audit: must not be negative"),
        (["explore", "late_read", "--policy", "nope"], "no policy is named 'nope'"),
        (["prove", "runs", "--n", "0"], "--n 0 would prove nothing"),
        (["prove", "runs", "--seed", "-1"], "argument --seed: must not be negative"),
        (["serving", "scan", "--runs", "1", "--out", "capacity.json"], "at least 2 --runs"),
        (["serving", "scan", "--workflows", "29", "--out", "capacity.json"], "at least 30 --workflows"),
        (["scorecrad"], "invalid choice: 'scorecrad'"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_arguments_exit_2_with_one_message(capsys, place, arguments, message):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (place / "results" / "runs").exists()


def test_traceback_on_request():
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        main(["reproduce", "tow", "--traceback"])


def test_a_notebook_that_cannot_take_the_parameters_is_found_before_the_first_runs(capsys, place):
    path = place / "notebooks" / "toy.ipynb"
    path.write_text(path.read_text().replace("overrides: dict = {}", "override: dict = {}"))
    assert main(["reproduce", "--set", "grid.load=[1.0]"]) == 2
    assert "'toy.ipynb' has no parameter 'overrides'; did you mean 'override'?" in capsys.readouterr().err


def test_dry_run_says_the_cost_and_leaves_nothing(capsys, place):
    assert main(["reproduce", "--dry-run", "--profile", "paper"]) == 0
    said = capsys.readouterr().out
    assert "toy: 6 cells, 0 of them stored, 6 to compute; about 36 calls, about 3 minutes -> " in said
    assert not (place / "results" / "runs").exists()


def test_results_that_cannot_be_written_are_told_before_anything_runs(capsys, place):
    (place / "file").touch()
    assert main(["reproduce", "--results", str(place / "file")]) == 1
    assert re.search(r"revise-lab: cannot write .*file.* pass another results_dir", capsys.readouterr().err)


@pytest.mark.slow
def test_reproduce_runs_the_notebook_and_ends_with_scorecard_and_paths(capsys, place):
    assert main(["reproduce", "toy", "--set", "grid.load=[1.5, 2]", "--profile", "quick"]) == 0
    out, err = capsys.readouterr()
    run = next((place / "results" / "runs" / "toy_lab.counting").iterdir())
    assert run.name.startswith("quick-")
    assert out.splitlines()[-2:] == [str(run / "tables" / "toy.csv"), str(run / "tables" / "toy.tex")]
    assert "226 not run" in out
    assert re.search(r"\[1/1\] toy \(quick\)\ntoy: cell 2/4 .*\[1/1\] toy done in [\d.]+ s", err, re.S)
    assert (run / "notebook.ipynb").exists()
    assert (run / "tables" / "toy.csv").read_text().startswith("load,tokens\n1.5,")
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["overrides"] == {"grid.load": [1.5, 2]}
    assert {"tables/toy.tex", "values.json", "notebook.ipynb"} <= set(manifest["deliverables"])


@pytest.mark.slow
def test_a_failure_leaves_the_others_running_and_exits_1(capsys, place):
    notebook(place / "notebooks" / "broken.ipynb", "1 / 0")
    notebook(place / "notebooks" / "toy.ipynb", SWEEP)
    assert main(["reproduce"]) == 1
    err = capsys.readouterr().err
    assert "broken FAILED: notebook 'broken': cell 3 (`1 / 0`) raised ZeroDivisionError" in err
    assert "toy FAILED: notebook 'toy': it ran to its end but did not write tables/toy.tex (missing)" in err
    assert "2 of 2 failed: broken, toy; what was finished is kept" in err


@pytest.mark.slow
def test_a_failed_cell_is_a_failed_notebook(capsys, monkeypatch):
    assert main(["reproduce", "toy", "--set", "fixed.fault=raise"]) == 1
    assert "raised CellFailed: 4 of 4 cells failed" in capsys.readouterr().err


def heed_ctrl_c():
    """Undo what a shell does to background jobs, for this run of the tests may be one: they ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_finished_and_the_same_command_takes_up(place, monkeypatch, number):
    monkeypatch.setenv("TOY_JOURNAL", str(place / "journal"))
    monkeypatch.setenv("TOY_SLEEP_S", "2")
    command = [sys.executable, "-m", "revise_lab.lab.cli", "reproduce", "toy"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=heed_ctrl_c
    )
    give_up = time.monotonic() + 90
    while not ((place / "journal").exists() and (place / "journal").read_text().count("\n") >= 3):
        assert time.monotonic() < give_up
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "interrupted; everything finished is kept, and the same command takes up from there" in said
    assert "Traceback" not in said
    run = next((place / "results" / "runs" / "toy_lab.counting").iterdir())
    assert (run / "notebook.failed.ipynb").exists()
    assert not (run / "notebook.ipynb").exists()
    monkeypatch.setenv("TOY_SLEEP_S", "0")
    assert main(["reproduce", "toy"]) == 0
    lines = (place / "journal").read_text().splitlines()
    assert len(set(lines)) == 4
    assert 4 <= len(lines) <= 5, "at most the cell in flight is computed twice"


def test_scorecard_as_text_and_as_json(capsys, place):
    assert main(["scorecard", "--results", str(place / "results")]) == 0
    assert capsys.readouterr().out.endswith("226 not run, 0 info of 226 rows\n")
    assert main(["scorecard", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 226
    assert {"id", "published", "value", "low", "high", "n", "unit", "source", "standing"} <= set(rows[0])


def test_a_closed_pipe_is_no_error(place):
    command = f"{sys.executable} -m revise_lab.lab.cli scorecard | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")


def test_verify_compares_with_the_reference(capsys, place):
    from revise_lab import lab

    config = lab.load("toy")
    lab.sweep(config, "results", progress=False)
    run = lab.RunFolder.of(config, "results").path
    assert main(["verify"]) == 1
    assert "no complete run in results/runs has a reference run" in capsys.readouterr().err
    reference = place / "results" / "reference" / "toy_lab.counting" / run.name
    reference.parent.mkdir()
    run.rename(reference)
    lab.sweep(config, "results", progress=False)
    assert main(["verify"]) == 0
    assert "exact columns equal, values within their intervals" in capsys.readouterr().out
    other = config.with_(seed=8, grid__load=[30.0])
    lab.sweep(other, "results", progress=False)
    moved = lab.RunFolder.of(other, "results").path
    assert main(["verify", str(moved)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"toy\.tokens moved from [\d.]+ to [\d.e+]+ tokens", said)
    assert main(["verify", str(run), str(reference)]) == 0
    assert main(["verify", str(place / "nothing")]) == 1
    assert "is no run folder" in capsys.readouterr().err


def test_a_scan_that_could_not_be_kept_does_not_begin(capsys, place):
    (place / "file").touch()
    assert main(["serving", "scan", "--out", str(place / "file" / "capacity.json")]) == 1
    said = capsys.readouterr()
    assert "cannot write" in said.err
    assert not said.out, "no rate was served"


@pytest.mark.parametrize("answer", [b"SSH-2.0-x", b"", b'{"data": [{"id": 5', b"[" * 100_000, b'{"data": [{"id": 5}]}'])
def test_doctor_meets_servers_that_are_none(answer):
    from revise_lab.lab.cli import _check_endpoint

    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % max(len(answer), 20)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            client, _ = server.accept()
            with client:
                client.recv(10_000)
                client.sendall(head + answer if answer[:1] in (b"{", b"[") else answer)

        thread = threading.Thread(target=serve)
        thread.start()
        good, said = _check_endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        thread.join()
    assert good == answer.endswith(b"}")
    assert "endpoint serves 5" in said if good else "gives no list of models" in said
    assert "control characters" in _check_endpoint("http://a b/v1")[1]


@pytest.mark.slow
def test_doctor_says_what_is_wrong(capsys, place):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert [line[:4] for line in said.splitlines()] == ["ok  "] * 6
    assert "a notebook runs on a kernel of this Python" in said
    (place / "file").touch()
    assert main(["doctor", "--endpoint", "http://127.0.0.1:9/v1", "--results", str(place / "file")]) == 1
    said = capsys.readouterr().out
    assert re.search(r"FAIL cannot write .*file", said)
    assert re.search(r"FAIL endpoint http://127.0.0.1:9/v1 gives no list of models: .*refused", said)
