"""Sweeps: only what is missing is computed, interruptions keep what is finished, executors agree."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from revise_lab.errors import CellFailed, ConfigError
from revise_lab.lab.config import load
from revise_lab.lab.results import RunFolder, verify
from revise_lab.lab.sweep import dry_run, sweep

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
sys.path.insert(0, str(HERE))

TOY = """\
schema: 1
experiment: toy_lab.counting
grid:
  load: [0.5, 1, 1.5]
  policy: [restart, revise]
replicates: 2
profiles:
  quick: {grid: {load: [0.5, 1, 1.5, 2]}}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(TOY)
    return load(path)


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """What the cell function was called with, counted across processes."""
    path = tmp_path / "journal.txt"
    monkeypatch.setenv("TOY_JOURNAL", str(path))
    return lambda: Counter(path.read_text().splitlines()) if path.exists() else Counter()


def quiet(config, results_dir, **options) -> pd.DataFrame:
    return sweep(config, results_dir, progress=False, **options)


# --- reuse -----------------------------------------------------------------------------------------------------------


def test_one_knob_changed_computes_only_the_cells_it_touches(config, tmp_path, journal, capsys):
    first = quiet(config, tmp_path)
    assert (len(journal()), set(journal().values())) == (12, {1})
    second = sweep(config.with_(grid__load=[1, 1.5, 2]), tmp_path)
    assert "12 cells, reused 8, computed 4, failed 0" in capsys.readouterr().err
    assert len(journal()) == 16
    assert set(journal().values()) == {1}, "no cell is computed twice"
    assert {line for line in journal() if line.startswith("2 ")} == {
        f"2 {policy} {replicate}" for policy in ("restart", "revise") for replicate in (0, 1)
    }
    shared = ["cell_id", "step", "calls", "tokens"]
    kept = first.merge(second, on=shared)
    assert len(kept) == 16, "reused rows are equal to the ones computed"


def test_another_profile_or_an_equal_config_reuses_everything(config, tmp_path, journal, capsys):
    quiet(config, tmp_path)
    sweep(config.with_(title="another title", grid__policy=["revise", "restart"]), tmp_path)
    assert "reused 12, computed 0" in capsys.readouterr().err
    sweep(load(tmp_path / "toy.yaml", "quick"), tmp_path)
    assert "16 cells, reused 12, computed 4" in capsys.readouterr().err
    assert sum(journal().values()) == 16


def test_a_run_that_reuses_is_whole_without_the_run_it_reused(config, tmp_path, journal):
    wide = quiet(load(tmp_path / "toy.yaml", "quick"), tmp_path)
    narrow = quiet(config, tmp_path)
    assert sum(journal().values()) == 16
    run = RunFolder.of(config, tmp_path)
    assert (run.manifest["status"], run.manifest["sweeps"][-1]["reused"]) == ("complete", 12)
    for path in RunFolder.of(load(tmp_path / "toy.yaml", "quick"), tmp_path).path.iterdir():
        path.unlink()
    pd.testing.assert_frame_equal(run.frame(), narrow)
    assert wide[wide["load"] < 2]["tokens"].tolist() == narrow["tokens"].tolist()


def test_a_finished_run_is_not_touched_by_a_repeated_sweep(config, tmp_path):
    first = quiet(config, tmp_path)
    run = RunFolder.of(config, tmp_path)
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    pd.testing.assert_frame_equal(quiet(config, tmp_path), first)
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_another_version_of_the_algorithm_reuses_nothing(config, tmp_path, journal):
    quiet(config, tmp_path)
    (tmp_path / "plain.yaml").write_text(TOY.replace("counting", "plain"))
    quiet(load(tmp_path / "plain.yaml"), tmp_path)
    assert set(journal().values()) == {2}


def test_a_torn_part_is_computed_again_with_a_warning(config, tmp_path, journal):
    first = quiet(config, tmp_path)
    part = RunFolder.of(config, tmp_path).parts.files()[0]
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=rf"{part.name} is set aside"):
        second = quiet(config, tmp_path)
    assert set(journal().values()) == {2}
    pd.testing.assert_frame_equal(second, first)
    assert part.with_name(f"{part.name}.corrupt").exists()


def test_a_torn_part_of_another_run_is_not_trusted(config, tmp_path, journal):
    quiet(config, tmp_path)
    part = RunFolder.of(config, tmp_path).parts.files()[0]
    part.write_bytes(part.read_bytes()[:-1])
    quiet(config.with_(grid__load=[1.0]), tmp_path)
    assert journal()["1 revise 0"] == 2


def test_withdrawn_rows_are_not_reused(config, tmp_path, journal):
    quiet(config, tmp_path)
    RunFolder.of(config, tmp_path).invalidate("measured on battery")
    quiet(config.with_(replicates=1), tmp_path)
    assert journal()["1 revise 0"] == 2
    quiet(config, tmp_path)
    assert RunFolder.of(config, tmp_path).manifest["invalidated"] is None


# --- executors -------------------------------------------------------------------------------------------------------


def test_serial_and_joblib_give_equal_frames(config, tmp_path):
    serial = quiet(config, tmp_path / "a", executor="serial")
    parallel = quiet(config, tmp_path / "b", n_jobs=2)
    assert RunFolder.of(config, tmp_path / "b").manifest["sweeps"][0]["executor"] == "joblib"
    pd.testing.assert_frame_equal(serial, parallel)
    assert verify(RunFolder.of(config, tmp_path / "a"), RunFolder.of(config, tmp_path / "b")).empty


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dask_gives_the_same_frame(config, tmp_path):
    pytest.importorskip("distributed")
    serial = quiet(config, tmp_path / "a", executor="serial")
    pd.testing.assert_frame_equal(quiet(config, tmp_path / "b", n_jobs=2, executor="dask"), serial)


def test_timed_cells_run_alone(config, tmp_path):
    quiet(config.with_(exclusive=True), tmp_path, n_jobs=4, executor="joblib")
    entry = RunFolder.of(config, tmp_path).manifest["sweeps"][0]
    assert (entry["executor"], entry["n_jobs"]) == ("serial", 1)


def test_a_wrong_executor_or_number_of_jobs_is_named(config, tmp_path):
    with pytest.raises(ConfigError, match="allowed: serial, joblib, dask; did you mean 'joblib'"):
        quiet(config, tmp_path, executor="joblip")
    with pytest.raises(ConfigError, match="n_jobs is 0"):
        quiet(config, tmp_path, n_jobs=0)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_sweeps_side_by_side_do_not_harm_each_other(config, tmp_path):
    arguments, environ = _command(tmp_path, TOY_SLEEP_S="0.05")
    both = [subprocess.Popen(arguments, env=environ, stderr=subprocess.PIPE) for _ in range(2)]
    for one in both:
        assert one.wait(60) == 0, one.stderr.read()
        one.stderr.close()
    run = RunFolder.of(config, tmp_path / "results")
    assert (run.manifest["status"], run.manifest["cells"]["done"]) == ("complete", 12)
    pd.testing.assert_frame_equal(run.frame(), quiet(config, tmp_path / "alone"))


# --- interruptions ---------------------------------------------------------------------------------------------------

RUN = """\
import sys
sys.path.insert(0, sys.argv[1])
from revise_lab.lab.config import load
from revise_lab.lab.sweep import sweep
try:
    sweep(load(sys.argv[2]), sys.argv[3], n_jobs=int(sys.argv[4]))
except KeyboardInterrupt:
    sys.exit(130)
"""


def _command(tmp_path: Path, n_jobs: int = 1, **environ: str) -> tuple[list[str], dict[str, str]]:
    arguments = [
        sys.executable,
        "-c",
        RUN,
        str(HERE),
        str(tmp_path / "toy.yaml"),
        str(tmp_path / "results"),
        str(n_jobs),
    ]
    return arguments, os.environ | {"PYTHONPATH": str(ROOT)} | environ


def _interrupt(config, tmp_path: Path, journal, what: signal.Signals, n_jobs: int = 1) -> int:
    """Start a sweep of slow cells in a process group of its own and send it a signal after some of them."""
    arguments, environ = _command(tmp_path, n_jobs, TOY_SLEEP_S="0.25")
    with (tmp_path / "stderr.txt").open("wb") as stderr:
        environ["PYTHONFAULTHANDLER"] = "1"
        process = subprocess.Popen(
            arguments,
            env=environ,
            start_new_session=True,
            stderr=stderr,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
        )
    run, limit = RunFolder.of(config, tmp_path / "results"), time.monotonic() + 60
    while len(run.parts.ids() if run.path.exists() else ()) < 2:
        assert process.poll() is None, "the sweep ended before it was interrupted"
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.killpg(process.pid, what)
    return process.wait(60)


def test_a_killed_sweep_resumes_to_the_same_exact_columns(config, tmp_path, journal):
    assert _interrupt(config, tmp_path, journal, signal.SIGKILL) == -signal.SIGKILL
    run = RunFolder.of(config, tmp_path / "results")
    kept = run.parts.ids()
    assert run.manifest["status"] == "started"
    assert 2 <= len(kept) < 12
    resumed = quiet(config, tmp_path / "results")
    assert sum(journal().values()) - 12 <= 12 - len(kept), "kept cells are not computed again"
    assert sum(count > 1 for count in journal().values()) <= 12 - len(kept)
    pd.testing.assert_frame_equal(resumed, quiet(config, tmp_path / "whole"))
    assert verify(run, RunFolder.of(config, tmp_path / "whole")).empty


@pytest.mark.parametrize("n_jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_keeps_what_is_finished(config, tmp_path, journal, n_jobs):
    code = _interrupt(config, tmp_path, journal, signal.SIGINT, n_jobs)
    run = RunFolder.of(config, tmp_path / "results")
    manifest, kept = run.manifest, run.parts.ids()
    assert (manifest["status"], manifest["cells"]["done"]) == ("partial", len(kept))
    assert manifest["sweeps"][-1]["ended"] == "KeyboardInterrupt"
    assert 2 <= len(kept) < 12
    assert code == 130, (tmp_path / "stderr.txt").read_text()
    before = sum(journal().values())
    quiet(config, tmp_path / "results")
    assert sum(journal().values()) - before == 12 - len(kept)
    assert run.manifest["status"] == "complete"


# --- failures --------------------------------------------------------------------------------------------------------

FAULTY = """\
schema: 1
experiment: toy_lab.counting
grid:
  load: [1, 2]
  fault: ["", FAULT]
"""


@pytest.fixture
def faulty(tmp_path):
    def write(fault: str, **changes):
        (tmp_path / "faulty.yaml").write_text(FAULTY.replace("FAULT", fault))
        return load(tmp_path / "faulty.yaml").with_(**changes)

    return write


@pytest.mark.parametrize("n_jobs", [1, 2])
@pytest.mark.parametrize(
    ("fault", "says"),
    [("raise", r"ValueError: no plan at load 1 \(counting.py:\d+"), ("empty", "no row"), ("mixed", "'calls'")],
)
def test_a_cell_that_fails_stops_no_other_and_is_named(faulty, tmp_path, n_jobs, fault, says):
    config = faulty(fault)
    with pytest.raises(CellFailed, match=says) as caught:
        quiet(config, tmp_path, n_jobs=n_jobs)
    bad = {cell.id for cell in config.cells() if cell.params["fault"]}
    assert set(caught.value.failed) == bad
    assert pickle.loads(pickle.dumps(caught.value)).failed == caught.value.failed
    run = RunFolder.of(config, tmp_path)
    assert (run.manifest["status"], set(run.manifest["failed"])) == ("failed", bad)
    assert run.parts.ids() == {cell.id for cell in config.cells()} - bad
    assert run.manifest["failed"][min(bad)]["params"]["fault"] == fault


def test_only_failed_cells_are_tried_again(faulty, tmp_path, journal):
    config = faulty("raise")
    for _ in range(2):
        with pytest.raises(CellFailed, match="2 of 4 cells failed"):
            quiet(config, tmp_path)
    assert journal() == {"1 revise 0": 3, "2 revise 0": 3}


def test_a_worker_that_dies_leaves_the_finished_cells(faulty, tmp_path):
    config = faulty("die", grid__load=[1.0, 2.0, 3.0], grid__fault=["die"]).with_(grid__fault=["", "die"])
    quiet(config.with_(grid__fault=[""]), tmp_path)
    with pytest.raises(CellFailed, match="a worker process died"):
        quiet(config, tmp_path, executor="joblib", n_jobs=2)
    run = RunFolder.of(config, tmp_path)
    assert (run.manifest["status"], len(run.parts.ids())) == ("partial", 3)
    assert run.manifest["sweeps"][-1]["ended"] == "CellFailed"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dask_workers_that_keep_dying_end_the_sweep(faulty, tmp_path):
    """A local cluster gives up replacing workers; the sweep must end then, not wait."""
    pytest.importorskip("distributed")
    with pytest.raises(CellFailed, match=r"a worker process died|KilledWorker"):
        quiet(faulty("die"), tmp_path, executor="dask", n_jobs=2)
    assert RunFolder.of(faulty("die"), tmp_path).manifest["status"] in ("failed", "partial")


# --- cost ------------------------------------------------------------------------------------------------------------


def test_a_dry_run_computes_and_writes_nothing(config, tmp_path, journal):
    cost = dry_run(config, tmp_path / "results")
    assert cost == {"cells": 12, "reusable": 0, "missing": 12, "calls": 72, "tokens": None, "minutes": 6.0}
    assert dry_run(config, tmp_path / "results", n_jobs=2)["minutes"] == 3.0
    assert not journal()
    assert not (tmp_path / "results").exists()
    quiet(config.with_(grid__load=[0.5]), tmp_path / "results")
    assert dry_run(config, tmp_path / "results")["missing"] == 8


def test_minutes_come_from_earlier_sweeps_where_nothing_is_estimated(tmp_path, monkeypatch):
    (tmp_path / "plain.yaml").write_text(TOY.replace("counting", "plain"))
    config = load(tmp_path / "plain.yaml")
    assert dry_run(config, tmp_path)["minutes"] is None
    monkeypatch.setenv("TOY_SLEEP_S", "0.02")
    quiet(config.with_(grid__load=[0.5]), tmp_path)
    assert dry_run(config, tmp_path)["minutes"] * 60 >= 8 * 0.02


@pytest.mark.parametrize(
    ("executor", "limits", "computed", "says"),
    [
        ("serial", {"max_calls": 20}, 3, "stopped by max_calls=20 after 18 calls"),
        ("joblib", {"max_calls": 20}, 3, "stopped by max_calls=20 after 18 calls"),
        ("serial", {"max_calls": 5}, 0, "stopped by max_calls=5 after 0 calls"),
        # tokens are not estimated, so cells in flight are not foreseen; in series there are none
        ("serial", {"max_tokens": 250}, 3, r"stopped by max_tokens=250 after \d+(\.\d+)? tokens"),
    ],
)
def test_a_sweep_stops_before_a_limit_and_goes_on_later(config, tmp_path, executor, limits, computed, says):
    with pytest.warns(UserWarning, match=f"{says}; {12 - computed} cells are left"):
        frame = quiet(config, tmp_path, executor=executor, n_jobs=1 if executor == "serial" else 2, **limits)
    assert frame["cell_id"].nunique() == computed
    manifest = RunFolder.of(config, tmp_path).manifest
    assert manifest["status"] == "partial"
    assert manifest["sweeps"][-1]["ended"].startswith("stopped by")
    assert quiet(config, tmp_path)["cell_id"].nunique() == 12


def test_unknown_usage_stops_a_sweep_that_has_a_limit(config, tmp_path):
    unknown = config.with_(fixed__fault="unknown_usage")
    with pytest.warns(UserWarning, match="after 0 tokens: those of cell [0-9a-f]+ are not known; 11 cells are left"):
        quiet(unknown, tmp_path, max_tokens=10**9)
    assert quiet(unknown, tmp_path)["cell_id"].nunique() == 12, "without a limit it does not matter"


# --- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_one_moving_line_in_a_terminal(config, tmp_path, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TOY_SLEEP_S", "0.05")
    sweep(config, tmp_path)
    lines = stream.getvalue().split("\r\x1b[K")
    assert len(lines) > 2
    assert lines[-1].count("\n") == "".join(lines).count("\n") == 1
    assert "12 cells, reused 0, computed 12, failed 0" in lines[-1]
    assert lines[-1].rstrip().endswith("0 s left")


def test_progress_can_be_silenced(config, tmp_path, capsys):
    quiet(config, tmp_path)
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_one_last_line(config, tmp_path, capsys):
    sweep(config, tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert json.dumps(err).isascii()
