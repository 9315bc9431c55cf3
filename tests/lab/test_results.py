"""Run folders: manifests, parts that are trusted whole or not at all, deliverables, comparing two runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from revise_lab.errors import ResultsError
from revise_lab.lab import experiments
from revise_lab.lab.cli import main
from revise_lab.lab.config import load
from revise_lab.lab.executors import compute
from revise_lab.lab.files import environment, write_atomic
from revise_lab.lab.parts import as_table
from revise_lab.lab.results import RunFolder, compare, verify
from revise_lab.lab.sweep import sweep

sys.path.insert(0, str(Path(__file__).parent))

TOY = """\
schema: 1
experiment: toy_lab.counting
grid:
  load: [0.5, 1, 1.5]
  policy: [restart, revise]
figures: [goodput]
tables: [calls]
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(TOY)
    return load(path)


@pytest.fixture
def experiment():
    return experiments.get("toy_lab.counting")


def fill(config, results_dir, cells=None) -> RunFolder:
    """Store the cells one part each, as a sweep of slow cells does."""
    run = RunFolder.create(config, results_dir)
    run.start(executor="serial", n_jobs=1)
    experiment = experiments.get(config.experiment)
    for cell in config.cells()[:cells]:
        run.parts.append([as_table(experiment, cell, compute(cell).rows)])
    run.finish(len(config.cells()), {}, computed=len(config.cells()[:cells]), wall_s=1.0)
    return run


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_frame_has_ids_parameters_and_rows_in_a_readable_order(config, tmp_path):
    frame = fill(config, tmp_path).frame()
    names = ["cell_id", "load", "policy", "nodes", "mask", "fault", "replicate", "seed", "step", "calls", "tokens"]
    assert list(frame.columns) == [*names, "label"]
    assert frame["load"].tolist() == [0.5] * 4 + [1.0] * 4 + [1.5] * 4
    assert frame["policy"].tolist()[:4] == ["restart", "restart", "revise", "revise"]
    assert frame["step"].tolist() == [2, 1] * 6, "rows of a cell keep the order in which it returned them"
    assert frame["calls"].dtype == np.int64
    assert frame["mask"].unique().tolist() == ["[]"]
    assert set(frame["cell_id"]) == {cell.id for cell in config.cells()}
    assert frame.attrs["exact"] == ["step", "calls", "tokens", "label"]
    assert (frame.attrs["experiment"], frame.attrs["units"]["calls"]) == ("toy_lab.counting", "calls")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("empty", "returned no row"),
        ("nested", "column 'label': "),
        ("mixed", "column 'calls': "),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_cell_and_column(config, experiment, fault, says):
    cell = config.with_(fixed__fault=fault).cells()[0]
    with pytest.raises(ResultsError, match=cell.id) as caught:
        as_table(experiment, cell, compute(cell).rows)
    assert says in caught.value.message


def test_a_column_not_declared_is_refused_with_the_nearest_name(config, experiment):
    with pytest.raises(ResultsError, match="'token' is not in COLUMNS; did you mean 'tokens'"):
        as_table(experiment, config.cells()[0], [{"token": 1.0}])


@pytest.mark.parametrize(
    ("name", "value"), [("calls", 2.5), ("calls", True), ("calls", "3"), ("calls", 2**70), ("label", {"a": 1})]
)
def test_a_value_of_another_type_is_refused(config, experiment, name, value):
    with pytest.raises(ResultsError, match=f"column '{name}'"):
        as_table(experiment, config.cells()[0], [{"label": "x", name: value}])


def test_a_type_that_contradicts_stored_rows_is_refused_and_changes_nothing(config, experiment, tmp_path):
    run = fill(config, tmp_path, cells=1)
    before = sorted(run.path.iterdir())
    with pytest.raises(ResultsError, match="do not fit those stored"):
        run.parts.append([as_table(experiment, config.cells()[1], [{"step": "two"}])])
    assert sorted(run.path.iterdir()) == before


def test_a_value_not_known_stays_unknown(config, experiment, tmp_path):
    run = RunFolder.create(config, tmp_path)
    cells = config.cells()
    run.parts.append([as_table(experiment, cells[0], [{"tokens": None}])])
    run.parts.append([as_table(experiment, cells[1], [{"tokens": 3.5, "calls": 0}])])
    frame = run.frame(partial=True).set_index("cell_id")
    assert frame["tokens"].isna().to_dict() == {cells[0].id: True, cells[1].id: False}
    assert np.isnan(frame["calls"][cells[0].id])
    assert frame["calls"][cells[1].id] == 0


def test_a_cell_computed_twice_counts_once(config, experiment, tmp_path):
    run = fill(config, tmp_path)
    again = config.cells()[0]
    run.parts.append([as_table(experiment, again, [{"step": 9, "calls": 9, "tokens": 9.0, "label": "other"}])])
    frame = run.frame()
    assert len(frame[frame["cell_id"] == again.id]) in (1, 2), "the rows of one of the two, never of both"
    assert len(frame[frame["cell_id"] != again.id]) == 10
    pd.testing.assert_frame_equal(run.frame(), frame)


def test_many_parts_become_one_with_the_same_rows(config, tmp_path):
    run = fill(config.with_(replicates=2), tmp_path)
    before = run.frame()
    assert len(run.parts.files()) == 12
    run.parts.merge()
    assert len(run.parts.files()) == 1
    pd.testing.assert_frame_equal(run.frame(), before)


def test_equal_rows_make_equal_bytes(config, tmp_path):
    a, b = fill(config, tmp_path / "a"), fill(config, tmp_path / "b")
    assert [path.name for path in a.parts.files()] == [path.name for path in b.parts.files()]


# --- damage ----------------------------------------------------------------------------------------------------------


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


@pytest.mark.parametrize("damage", [_cut, _flip, lambda data: b"", lambda data: b"no parquet"])
def test_a_torn_part_is_never_trusted(config, experiment, tmp_path, damage):
    run = fill(config, tmp_path)
    part = run.parts.files()[2]
    part.write_bytes(damage(part.read_bytes()))
    with pytest.raises(ResultsError, match=rf"{part.name} is corrupt; run the sweep again"):
        run.frame()
    with pytest.warns(UserWarning, match=part.name):
        ids = run.parts.repair(experiment)
    assert len(ids) == 5
    assert [path.name for path in run.path.glob("*.corrupt")] == [f"{part.name}.corrupt"]


def test_a_part_that_is_gone_is_noticed(config, tmp_path):
    run = fill(config, tmp_path)
    run.parts.files()[0].unlink()
    with pytest.raises(ResultsError, match="5 of 6 cells are there"):
        run.frame()
    assert run.frame(partial=True)["cell_id"].nunique() == 5


def test_a_torn_manifest_is_set_aside_and_the_rows_stay(config, tmp_path):
    run = fill(config, tmp_path)
    (run.path / "manifest.json").write_text('{"experiment": "toy')
    with pytest.raises(ResultsError, match="cannot be read"):
        run.frame()
    with pytest.warns(UserWarning, match=r"manifest\.json"):
        RunFolder.create(config, tmp_path)
    assert len(run.parts.ids()) == 6
    (run.path / "manifest.json").write_text("[]")
    with pytest.raises(ResultsError, match="not the manifest of a run"):
        _ = run.manifest


def test_rows_of_other_columns_are_outdated(config, experiment, tmp_path):
    run = fill(config, tmp_path)
    part = run.parts.files()[0]
    data = as_table(experiment, config.cells()[0], [{"step": 1}]).drop_columns(["label"])
    part.unlink()
    run.parts.append([data])
    with pytest.warns(UserWarning, match="COLUMNS have changed under one ALGORITHM_VERSION"):
        assert len(run.parts.repair(experiment)) == 5


def test_withdrawn_rows_are_not_there_any_more(config, tmp_path):
    run = fill(config, tmp_path)
    run.invalidate("the clock was wrong")
    assert run.parts.ids() == set()
    assert run.manifest["invalidated"] == "the clock was wrong"
    with pytest.raises(ResultsError, match="0 of 6"):
        run.frame()


# --- disks -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResultsError, match="pass another results_dir") as caught:
        RunFolder.create(config, tmp_path / "file" / "results")
    assert str(tmp_path / "file") in caught.value.path


def test_what_was_there_survives_a_failed_write(tmp_path):
    target = tmp_path / "values.json"
    write_atomic(target, b"old")
    target.chmod(0o400)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ResultsError, match="cannot write"):
        write_atomic(tmp_path / "folder", b"a folder is in the way")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


FULL = """\
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from revise_lab.errors import ResultsError
from revise_lab.lab.config import load
from revise_lab.lab.sweep import sweep
config, results, room = load(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[5])
sweep(config.with_(grid__load=[0.5]), results, progress=False)
first = next(results.rglob("cells-*.parquet"))
before = first.read_bytes()
if sys.argv[4] == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
else:
    filler = open(results / "filler", "wb", buffering=0)
    try:
        while True:
            filler.write(b"x" * 4096)
    except OSError:
        filler.truncate(filler.tell() - room * (len(before) + 16384))
try:
    sweep(config, results, progress=False)
except ResultsError as error:
    print(error.errno, "free some space" in error.message, error.path)
assert first.read_bytes() == before
assert not list(results.rglob(".*.tmp"))
"""


def _run_full(tmp_path: Path, results_dir: Path, how: str, room: int) -> list[str]:
    (tmp_path / "toy.yaml").write_text(f"{TOY}replicates: 200\n")
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    arguments = [sys.executable, "-c", FULL, here, tmp_path / "toy.yaml", results_dir, how, room]
    environ = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([str(one) for one in arguments], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_write_over_the_size_limit_loses_nothing(tmp_path):
    errno, remedy, path = _run_full(tmp_path, tmp_path / "results", "limit", 1024)
    assert (errno, remedy) == ("27", "True")
    assert path.startswith(str(tmp_path / "results"))


@pytest.mark.parametrize(("room", "file"), [(0, "manifest.json"), (1, ".parquet")], ids=["at once", "at a part"])
def test_a_full_disk_loses_nothing_and_the_sweep_goes_on_once_there_is_room(tmp_path, room, file):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        errno, remedy, path = _run_full(tmp_path, disk, "fill", room)
        assert (errno, remedy) == ("28", "True")
        assert path.startswith(str(disk))
        assert path.endswith((file, "manifest.json")), "a slow machine may save its progress just then"
        (disk / "filler").unlink()
        config = load(tmp_path / "toy.yaml")
        assert sweep(config, disk, progress=False)["cell_id"].nunique() == 1200
        assert RunFolder.of(config, disk).manifest["status"] == "complete"
    finally:
        subprocess.run(["umount", disk], check=True)


# --- the manifest ----------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_ran_where_and_how_it_ended(config, tmp_path):
    run = fill(config.with_(seed=3), tmp_path, cells=4)
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert (manifest["status"], manifest["cells"]) == ("partial", {"total": 6, "done": 4, "failed": 0})
    assert manifest["config"]["grid"] == {"load": [0.5, 1, 1.5], "policy": ["restart", "revise"]}
    assert (manifest["overrides"], manifest["origins"]["seed"], manifest["seed"]) == ({"seed": 3}, "override", 3)
    assert run.path.name == f"smoke-{manifest['hash']}"
    assert manifest["columns"]["calls"] == {"kind": "exact", "unit": "calls", "help": "model calls", "dtype": "int"}
    assert manifest["sweeps"][0]["executor"] == "serial"
    assert manifest["started_utc"].endswith("+00:00")
    assert {"numpy", "pandas", "pyarrow"} <= manifest["packages"].keys()
    assert manifest["source"] == "emulated"


def test_the_environment_names_the_commit_of_a_checkout_even_inside_a_git_hook(monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    git, root = environment()["git"], Path(__file__).parents[2]
    if not (root / ".git").exists():
        assert git is None
        return
    assert len(git["commit"]) == 40
    assert (git["diff"] is not None) == git["dirty"]


def test_status_is_failed_only_while_a_cell_is_missing_because_it_raised(config, tmp_path):
    run = fill(config, tmp_path, cells=5)
    assert run.finish(6, {config.cells()[5].id: {"error": "x"}}) == "failed"
    assert list(run.manifest["failed"]) == [config.cells()[5].id]
    assert run.finish(6, {config.cells()[0].id: {"error": "x"}}) == "partial", "that cell is there after all"


# --- deliverables ----------------------------------------------------------------------------------------------------


def test_deliverables_are_named_and_hashed(config, tmp_path):
    run = fill(config, tmp_path)
    assert config.deliverables == (
        "figures/goodput.pdf",
        "figures/goodput.svg",
        "figures/goodput.png",
        "tables/calls.tex",
        "tables/calls.csv",
    )
    run.write("figures/goodput.pdf", b"%PDF")
    run.write("tables/calls.csv", "")
    found = run.record_deliverables()
    assert found == run.manifest["deliverables"]
    assert list(found) == ["figures/goodput.pdf", "tables/calls.csv"]
    with pytest.raises(ResultsError, match="leaves the run folder"):
        run.write("../elsewhere.txt", "x")


def test_values_are_read_or_computed_and_never_nan(config, tmp_path):
    run = fill(config, tmp_path)
    computed = run.values()
    assert [row["id"] for row in computed] == ["toy.tokens", "toy.cells"]
    run.write_values([*computed, {"id": "toy.none", "value": float("nan"), "n": np.int64(3)}])
    assert run.values()[2] == {"id": "toy.none", "value": None, "n": 3}
    assert run.values()[0]["value"] == pytest.approx(computed[0]["value"], abs=0)
    for text in ("{", "null", "[1]", '{"id": 1}', '[{"value": 1}]'):
        (run.path / "values.json").write_text(text)
        with pytest.raises(ResultsError, match=r"values\.json cannot be read: .*run the notebook again"):
            run.values()


# --- two runs --------------------------------------------------------------------------------------------------------


def value(name: str, number: float | None, low: float | None = None, high: float | None = None) -> dict:
    return {"id": name, "value": number, "low": low, "high": high, "unit": "calls"}


def test_compare_says_what_moved_beyond_its_interval(config, tmp_path):
    a, b = fill(config, tmp_path / "a"), fill(config, tmp_path / "b")
    a.write_values(
        [value("in", 5, 4, 6), value("out", 5, 4, 6), value("bare", 1), value("gone", 1), value("nan", None)]
    )
    b.write_values([value("in", 5.5, 5, 7), value("out", 9, 8, 10), value("bare", 1 + 1e-15), value("nan", None)])
    found = compare(a, str(b.path)).set_index("id")
    assert found["moved"].to_dict() == {"gone": True, "out": True, "bare": False, "in": False, "nan": False}
    assert list(found.index[:2]) == ["gone", "out"]
    assert (found["change"]["out"], found["b_high"]["out"], found["unit"]["in"]) == (4, 10, "calls")


def test_a_value_that_is_a_text_moved_if_it_is_another(config, tmp_path, capsys):
    a, b = fill(config, tmp_path / "a"), fill(config, tmp_path / "b")
    a.write_values([value("same", "KEEP"), value("other", "KEEP"), value("gone", "BLOCK"), value("number", 2)])
    b.write_values([value("same", "KEEP"), value("other", "BLOCK"), value("number", 2)])
    found = compare(a, b).set_index("id")
    assert found["moved"].to_dict() == {"gone": True, "other": True, "number": False, "same": False}
    assert (found["a"]["other"], found["b"]["other"], found["a"]["number"]) == ("KEEP", "BLOCK", 2)
    assert main(["verify", str(a.path), str(b.path)]) == 1
    assert "other moved from BLOCK to KEEP" in capsys.readouterr().out
    assert main(["verify", str(a.path), str(a.path)]) == 0


def test_runs_of_two_experiments_are_not_compared(config, tmp_path):
    (tmp_path / "plain.yaml").write_text(TOY.replace("counting", "plain"))
    a, b = fill(config, tmp_path), fill(load(tmp_path / "plain.yaml"), tmp_path)
    with pytest.raises(ResultsError, match=r"is of toy_lab\.counting"):
        compare(a, b)


def test_verify_finds_each_exact_difference_and_nothing_else(config, tmp_path):
    a, b = fill(config, tmp_path / "a"), fill(config, tmp_path / "b")
    assert verify(a, b.path).empty
    frame = b.frame()
    frame.loc[0, "tokens"] *= 1 + 1e-12
    frame.loc[1, "label"] = None
    changed = verify(a, frame)
    assert changed[["row", "column"]].values.tolist() == [[0, "tokens"], [1, "label"]]
    assert verify(a, frame, rtol=1e-9)["column"].tolist() == ["label"]
    lost = frame.iloc[2:]
    lost.attrs = frame.attrs
    assert verify(a, lost)[["column", "a", "b"]].values.tolist() == [["(row)", "present", "missing"]] * 2
    with pytest.raises(ResultsError, match="different exact columns"):
        verify(a, pd.DataFrame({"cell_id": []}))
