"""The command line: reproduce the papers, see where each value stands, check this machine.

Exit codes: 0 everything asked for succeeded, 1 something failed, 2 a wrong config or argument, 130 interrupted (what was
finished is kept).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from revise_lab import lab
from revise_lab.errors import ConfigError, NotebookFailed, RefusedCombination, ResultsError, ReviseLabError
from revise_lab.lab import calibrate, evidence, scan, serving, template
from revise_lab.lab.document import find, hint, nearest, override
from revise_lab.lab.files import environment, write_atomic

__all__ = ["main"]

PROFILES = ("smoke", "quick", "paper")
_LAST = "90_scorecard"
_EPILOG = """\
examples:
  revise-lab list                                    what there is
  revise-lab reproduce                               every notebook at smoke size
  revise-lab reproduce revise_provenance --profile quick
  revise-lab reproduce revise_serving --set grid.load=[0.7,1.0] --dry-run
  revise-lab reproduce 00_tour --endpoint http://127.0.0.1:8000/v1
  revise-lab scorecard --json
  revise-lab verify results/runs/revise_provenance/quick-1a2b3c4d
  revise-lab doctor
  revise-lab explore late_read --json                every order of one scenario
  revise-lab prove runs --n 50000 --jobs 2           random runs against the oracle and the auditor
  revise-lab bench core --quick                      certificates, planning, views, events
  revise-lab bench conditions --quick                the answer to a change while an action waits
  revise-lab bench serving --quick                   what serving runs cost
  revise-lab serving scan --out capacity.json        lengths and capacity, with one policy alone
  revise-lab serve --port 8000                       an emulated Qwen3-14B cluster over HTTP
  revise-lab calibrate --base-url http://127.0.0.1:8000/v1 --model NAME   measure a server, write its profile

profiles: what they cost on two cores without a GPU
  smoke   seconds per notebook; every code path, too few runs to judge most rows
  quick   about 5 minutes for everything; the shapes of the figures
  paper   the published numbers of runs; hours, see --dry-run first
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        The exit code.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as leave:
        return int(leave.code or 0)
    with contextlib.suppress(ValueError):  # as Ctrl-C, or the kernel of a notebook would run on; not from a thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        _say("interrupted; everything finished is kept, and the same command takes up from there")
        return 130
    except ReviseLabError as error:
        if arguments.traceback:
            raise
        _say(f"revise-lab: {error}")
        return 2 if isinstance(error, (ConfigError, RefusedCombination)) else 1
    except BrokenPipeError:  # the reader, head for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="revise-lab",
        description="Reproduce papers on revising agent workflows while they run. Everything runs offline against an "
        "emulated endpoint unless you name another.",
        epilog=_EPILOG,
        formatter_class=raw,
    )
    parser.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Command)

    def command(name: str, run: Any, text: str, epilog: str = _EPILOG) -> Command:
        sub = commands.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=raw)
        sub.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.set_defaults(run=run)
        return sub

    command("list", _list, "list notebooks, experiments and configs")
    reproduce = command("reproduce", _reproduce, "run notebooks, one process each, and end with the scorecard")
    reproduce.add_argument("names", nargs="*", metavar="NAME", help="notebook or experiment; default: all, in order")
    reproduce.add_argument("--jobs", type=_jobs, default=1, metavar="N", help="cells at once; -1: one per core")
    reproduce.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="overrides",
                           help="change a config value, for instance grid.load=[0.7,1.0]; may be repeated")  # fmt: skip
    reproduce.options(
        profile=("smoke", PROFILES, "size of the run (default: smoke)"),
        endpoint=("emulated", "URL", "emulated (default), or the URL of an OpenAI-compatible endpoint"),
        dry_run=(False, None, "say what would run and what it would cost"),
    )
    scorecard = command("scorecard", _scorecard, "show every published value beside ours")
    scorecard.options(json=(False, None, "as JSON"))
    verify = command("verify", _verify, "compare a run with another, or with the reference")
    newest = "run folder; default: the newest complete run of each experiment"
    verify.add_argument("a", nargs="?", metavar="A", help=newest)
    verify.add_argument("b", nargs="?", metavar="B", help="run folder; default: the reference of the same experiment")
    doctor = command("doctor", _doctor, "check Python, packages, kernel, write access, fonts and the endpoint")
    doctor.options(endpoint=("emulated", "URL", "emulated (default) or a URL to reach"))
    for module in (evidence, scan, serving, calibrate):
        module.add_commands(command)
    for sub in (reproduce, scorecard, verify, doctor):
        sub.options(results=(Path("results"), "DIR", "default: ./results"))
    return parser


class Command(argparse.ArgumentParser):
    """The parser of one command, whose plain options are rows of a table."""

    def options(self, **rows: tuple[Any, Any, str]) -> None:
        """Add options, by name: the default or, without one, what reads it; placeholder or choices; help."""
        for name, (default, shown, text) in rows.items():
            flag = f"--{name.replace('_', '-')}"
            if default is False:
                self.add_argument(flag, action="store_true", help=text)
                continue
            how = {"metavar": shown} if isinstance(shown, str) else {"choices": shown}
            kind = default if callable(default) else type(default)
            kind = _jobs if name == "jobs" else _count if kind is int else kind
            how |= {"type": kind} if callable(default) else {"type": kind, "default": default}
            self.add_argument(flag, help=text, **how)


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number


_count.__name__ = "int"  # what argparse calls it in a message


def _jobs(text: str) -> int:
    number = int(text)
    if number == 0 or number < -1:
        raise argparse.ArgumentTypeError("must be a positive number, or -1 for one per core")
    return number


# --- list ------------------------------------------------------------------------------------------------------------


def _list(_: argparse.Namespace) -> int:
    notebooks, known = _notebooks(), lab.experiments.names()
    for name in [*notebooks, *(name for name in known if name not in notebooks)]:
        what = {"notebook": name in notebooks, "config": _has_config(name), "experiment": name in known}
        kinds = ", ".join(kind for kind, there in what.items() if there)
        print(f"{name:<28} {kinds:<32} {_title(notebooks.get(name))}".rstrip())
    return 0


def _title(notebook: Path | None) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"] if notebook else []
    source = "".join(cells[0]["source"]) if cells and cells[0]["cell_type"] == "markdown" else ""
    return source.strip().partition("\n")[0].lstrip("# ")


def _notebooks() -> dict[str, Path]:
    """Return the notebooks in the order they run in: the scorecard is last."""
    for folder in (Path("notebooks"), Path(__file__).resolve().parents[2] / "notebooks"):
        found = {path.stem: path.resolve() for path in sorted(folder.glob("*.ipynb"))}
        if found:
            return dict(sorted(found.items(), key=lambda item: (item[0] == _LAST, item[0])))
    return {}


def _has_config(name: str) -> bool:
    try:
        return find(name).is_file()
    except ConfigError:
        return False


# --- reproduce -------------------------------------------------------------------------------------------------------


def _reproduce(arguments: argparse.Namespace) -> int:
    results = arguments.results.resolve()
    jobs = [_Job(name, arguments, results) for name in _chosen(arguments.names)]
    if arguments.dry_run:
        return _dry_run(jobs, results, arguments.jobs)
    _writable(results)
    failed, written = [], []
    for number, job in enumerate(jobs, 1):
        start = time.monotonic()
        _say(f"[{number}/{len(jobs)}] {job.name} ({arguments.profile})")
        try:
            written += job.run()
            _say(f"[{number}/{len(jobs)}] {job.name} done in {time.monotonic() - start:.1f} s")
        except ReviseLabError as error:
            failed.append(job.name)
            _say(f"[{number}/{len(jobs)}] {job.name} FAILED: {error}")
    print(lab.scorecard(results))
    for path in written:
        print(path)
    if failed:
        _say(f"{len(failed)} of {len(jobs)} failed: {', '.join(failed)}; what was finished is kept")
    return 1 if failed else 0


def _chosen(names: Sequence[str]) -> list[str]:
    notebooks = _notebooks()
    known = [*notebooks, *(name for name in lab.experiments.names() if _has_config(name) and name not in notebooks)]
    for name in names:
        if name not in known:
            guess = hint(nearest(name, known)) or f"; there are: {', '.join(known) or 'none'}"
            raise ConfigError(f"no notebook or experiment is called {name!r}{guess}", name=name)
    chosen = [name for name in known if name in names] if names else list(notebooks)
    if not chosen:
        raise ConfigError("there are no notebooks here; run from a checkout, or name an experiment")
    return sorted(chosen, key=lambda name: name == _LAST)


class _Job:
    """One notebook, or one experiment without a notebook, with what it needs to know."""

    def __init__(self, name: str, arguments: argparse.Namespace, results: Path) -> None:
        self.name, self.results, self.profile, self.n_jobs = name, results, arguments.profile, arguments.jobs
        self.notebook = _notebooks().get(name)
        self.overrides = dict(override(item) for item in arguments.overrides)
        if "source" in self.overrides:
            raise ConfigError("--set source: where values come from is not chosen; --endpoint URL makes them measured")
        self.config = None
        if _has_config(name):
            self.overrides |= _endpoint(name, arguments.endpoint)
            self.config = lab.load(name, arguments.profile, self.overrides)
        elif arguments.names and self.overrides:
            raise ConfigError(f"'{name}' has no config, so --set changes nothing there", name=name)
        named = self.results / "runs" / self.name / self.profile
        self.folder = named if self.config is None else lab.RunFolder.of(self.config, self.results).path
        self.given: dict[str, Any] = {}
        if self.notebook is not None:
            given = {"profile": self.profile, "results_dir": str(results)}
            given |= {"n_jobs": self.n_jobs, "endpoint": arguments.endpoint}
            known = template.parameters(self.notebook)  # a tour need not take them all
            self.given = {name: value for name, value in given.items() if name in known}
            if self.config is not None and self.overrides:
                self.given["overrides"] = self.overrides
            template.check_parameters(self.notebook, self.given)  # a slip must not wait for its turn

    def run(self) -> list[Path]:
        """Run the notebook, or the bare sweep, and return the figures and tables it wrote."""
        if self.notebook is None:
            frame = lab.sweep(self.config, self.results, n_jobs=self.n_jobs)
            values = lab.experiments.get(self.config.experiment).values(frame)
            lab.RunFolder(self.folder).write_values(values)
        else:
            wanted, limits = template.declared(self.notebook)
            limit = limits[self.profile]
            if self.config is not None:
                wanted, limit = wanted + self.config.deliverables, self.config.budget_s or limit
            how = {"timeout_s": limit, "deliverables": wanted, "progress": _say}
            lab.run_notebook(self.notebook, self.folder, self.given, **how)
        if self.config is not None:
            run = lab.RunFolder(self.folder)
            if (status := run.manifest["status"]) != "complete":
                raise ResultsError(f"its run is {status}: {run.manifest['cells']}; see {self.folder}/manifest.json")
            run.record_deliverables()
        return sorted(path for kind in ("figures", "tables") for path in (self.folder / kind).glob("[!.]*.*"))


def _endpoint(name: str, endpoint: str) -> dict[str, Any]:
    if endpoint == "emulated":
        return {}
    if "://" not in endpoint:
        raise ConfigError(f"--endpoint is {endpoint!r}, neither 'emulated' nor a URL such as http://127.0.0.1:8000/v1")
    for url in endpoint.split(","):
        with contextlib.suppress(OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError):
            if "revise_lab" in str(_models(url.strip())[0].get("owned_by")):
                raise ConfigError(
                    f"{url.strip()} is an emulation of ours, and results would call it measured; leave --endpoint away"
                )
    if "endpoint" not in lab.experiments.get(lab.load(name).experiment).params:
        _say(f"{name} talks to no endpoint; --endpoint changes nothing there")
        return {}
    return {"fixed.endpoint": endpoint}


def _dry_run(jobs: list[_Job], results: Path, n_jobs: int) -> int:
    for job in jobs:
        if job.config is None:
            print(f"{job.name}: no cells, only the notebook")
            continue
        costs = lab.dry_run(job.config, results, n_jobs)
        measures = {name: costs[name] for name in ("calls", "tokens", "minutes")}
        known = [f"about {value:,.3g} {name}" for name, value in measures.items() if value is not None]
        cells = f"{costs['cells']} cells, {costs['reusable']} of them stored, {costs['missing']} to compute"
        print(f"{job.name}: {cells}; {', '.join(known) or 'cost unknown'} -> {job.folder}")
    return 0


def _writable(results: Path) -> None:
    write_atomic(results / ".writable", b"").unlink()


# --- scorecard, verify -----------------------------------------------------------------------------------------------


def _scorecard(arguments: argparse.Namespace) -> int:
    card = lab.scorecard(arguments.results)
    print(json.dumps(list(card), indent=1, ensure_ascii=False) if arguments.json else card)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    differs = False
    for ours, theirs in _pairs(arguments):
        said, moved = _compare(ours, theirs)
        print(f"{ours}\n  against {theirs}\n  {said}")
        differs |= moved
    return int(differs)


def _pairs(arguments: argparse.Namespace) -> list[tuple[Path, Path]]:
    if arguments.b:
        return [(Path(arguments.a), Path(arguments.b))]
    results = arguments.results
    if arguments.a:
        run = lab.RunFolder(arguments.a)
        if not (found := _references(results, run.manifest)):
            raise ResultsError(f"there is no reference run of {run.manifest['experiment']}; name a second run folder")
        return [(run.path, found[0])]
    newest: dict[str, tuple[str, Path, Path]] = {}
    for path in sorted((results / "runs").glob("*/*/manifest.json")):
        manifest = lab.RunFolder(path.parent).manifest
        if manifest["status"] == "complete" and (found := _references(results, manifest)):
            entry = (str(manifest.get("finished_utc")), path.parent, found[0])
            newest[manifest["experiment"]] = max(newest.get(manifest["experiment"], entry), entry)
    if not newest:
        raise ResultsError(
            f"no complete run in {results / 'runs'} has a reference run of its experiment to be held against; "
            "run revise-lab reproduce first, or name two run folders"
        )
    return [(run, theirs) for _, run, theirs in newest.values()]


def _references(results: Path, manifest: dict[str, Any]) -> list[Path]:
    """Return the reference runs of an experiment, those of the same config first."""
    from revise_lab.lab.scorecard import reference

    found = sorted(path.parent for path in (reference(results) / manifest["experiment"]).rglob("manifest.json"))
    return sorted(found, key=lambda path: lab.RunFolder(path).manifest.get("hash") != manifest["hash"])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _compare(ours: Path, theirs: Path) -> tuple[str, bool]:
    moved = lab.compare(theirs, ours).query("moved")
    said = [f"{row.id} moved from {_shown(row.a)} to {_shown(row.b)} {row.unit}" for row in moved.itertuples()]
    same = lab.RunFolder(ours).manifest["hash"] == lab.RunFolder(theirs).manifest["hash"]
    if same and list(theirs.glob("cells-*.parquet")):
        rows = [f"{row.column} of cell {row.cell_id} was {row.a!r}, is {row.b!r}"
                for row in lab.verify(theirs, ours).itertuples()]  # fmt: skip
        said += rows[:10] + ([f"and {len(rows) - 10} more"] if len(rows) > 10 else [])
        agreed = "exact columns equal, values within their intervals"
    else:
        agreed = "values within their intervals (" + ("the reference keeps no rows" if same else "other config") + ")"
    return "\n  ".join(said) or agreed, bool(said)


# --- doctor ----------------------------------------------------------------------------------------------------------


def _doctor(arguments: argparse.Namespace) -> int:
    outcomes = list(_checks(arguments))
    for good, said in outcomes:
        print(f"{'ok  ' if good else 'FAIL'} {said}")
    return 0 if all(good for good, _ in outcomes) else 1


def _checks(arguments: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    from matplotlib import font_manager

    seen = environment()
    yield sys.version_info >= (3, 11), f"Python {seen['python']} (3.11 or newer is needed)"
    git = seen["git"] or {}
    tree = f"commit {git['commit'][:10]}{', uncommitted changes' if git['dirty'] else ''}" if git else "no checkout"
    yield True, f"{tree}; " + ", ".join(f"{name} {version}" for name, version in seen["packages"].items())
    try:
        font_manager.findfont("DejaVu Sans", fallback_to_default=False)
        yield True, "font DejaVu Sans"
    except ValueError:
        yield False, "font DejaVu Sans is missing, so figures would differ: reinstall matplotlib"
    yield _check_kernel()
    try:
        _writable(arguments.results)
        yield True, f"results can be written to {arguments.results}"
    except ResultsError as error:
        yield False, str(error)
    yield _check_endpoint(arguments.endpoint)


def _check_kernel() -> tuple[bool, str]:
    import tempfile

    import nbformat

    cell = nbformat.v4.new_code_cell("x: int = 1  # anything", metadata={"tags": ["parameters"]})
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "probe" / "probe.ipynb"
        path.parent.mkdir()
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
        try:
            lab.run_notebook(path, Path(name) / "out", {"x": 2}, timeout_s=60)
        except NotebookFailed as error:
            return False, f"a notebook does not run: {error}; try: pip install --force-reinstall ipykernel"
    return True, "a notebook runs on a kernel of this Python"


def _check_endpoint(endpoint: str) -> tuple[bool, str]:
    from urllib.error import HTTPError

    if endpoint == "emulated":
        return True, "the endpoint is emulated, so there is nothing to reach; --endpoint URL checks a real one"
    if not endpoint.startswith(("http://", "https://")):
        return False, f"endpoint {endpoint!r} is neither 'emulated' nor an http(s) URL"
    try:
        names = ", ".join(str(model["id"]) for model in _models(endpoint))
    except HTTPError as error:
        refused = error.code in (401, 403)
        return refused, f"endpoint answers with HTTP {error.code} (a key in REVISE_LAB_API_KEY may be needed)"
    except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError) as error:
        return False, f"endpoint {endpoint} gives no list of models: {getattr(error, 'reason', error)}"
    return True, f"endpoint serves {names}"


def _models(endpoint: str) -> list[dict[str, Any]]:
    from urllib.request import urlopen

    with urlopen(f"{endpoint.rstrip('/')}/models", timeout=5) as answer:
        return list(json.load(answer)["data"])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
