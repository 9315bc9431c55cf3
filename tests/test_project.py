"""The project around the code: what the pages promise exists, and the house rules that a machine can check."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

import revise_lab
from revise_lab.draw import workflow_svg
from revise_lab.policies import policy
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.runtime.simulator import Simulator
from revise_lab.workloads.supplier.native import INPUTS, REVISIONS, build

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PURE = ("records", "core", "audit", "policies")
HEAVY = ("numpy", "pandas", "scipy", "matplotlib", "pydantic", "openai", "langgraph", "jupyter_client", "asyncio")


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- what the pages say ----------------------------------------------------------------------------------------------


def _commands(page: Path) -> list[str]:
    """Commands in blocks without a language and in backticks."""
    text = _read(page)
    fenced = r"^```(\w*)\n(.*?)^```"
    blocks = [block for language, block in re.findall(fenced, text, flags=re.M | re.S) if not language]
    inline = re.findall(r"`([^`\n]+)`", re.sub(fenced, "", text, flags=re.M | re.S))
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()] + inline
    return [
        line for line in lines if re.match(r"(make|revise-lab) [a-z]", line) and "|" not in line and "<" not in line
    ]


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_every_command_on_a_page_exists(page):
    from revise_lab.lab.cli import _parser

    targets = set(re.findall(r"^([a-z]+):", _read(ROOT / "Makefile"), flags=re.M))
    for command in _commands(page):
        tool, name, *rest = shlex.split(command)
        if tool == "make":
            assert name in targets, command
            assert all("=" in word for word in rest), command
        else:
            _parser().parse_args([name, *rest])


def test_the_readme_opens_with_the_two_commands():
    assert len(_commands(ROOT / "README.md")) >= 10
    first_screen = _read(ROOT / "README.md").splitlines()[:12]
    assert [line.split(" #")[0].strip() for line in first_screen if line.startswith("make")] == [
        "make reproduce",
        "make test",
    ]


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_links_lead_somewhere(page):
    def anchors(target: Path) -> set[str]:
        heads = re.findall(r"^#+ (.*)$", _read(target), flags=re.M)
        return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}

    for link in re.findall(r"\]\(([^)\s]+)\)", _read(page)):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} -> {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} -> {link}"


PROGRAM = re.compile(r"```python\n((?:(?!```).)*)```\n\nprints\n\n```text\n(.*?)```", flags=re.S)
PROGRAMS = [(page.name, *found) for page in PAGES for found in PROGRAM.findall(_read(page))]


@pytest.mark.parametrize(("page", "program", "printed"), PROGRAMS, ids=[each[0] for each in PROGRAMS])
def test_a_program_on_a_page_prints_what_stands_below_it(page, program, printed, tmp_path):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def _supplier(name: str, at_s: float):
    """Revise the policy tier while the report is being written; every call takes a second."""
    path, value = REVISIONS["policy_control"]
    artifact, *rest = path.split(".")
    revision = Revision("r1", (Change(artifact, Op.SET, tuple(rest), value),))
    return Simulator(build(), INPUTS, policy(name), revisions=[(at_s, revision)]).run()


def test_the_picture_in_the_readme_is_what_the_machine_plans(tmp_path):
    runs = {name: _supplier(name, at_s=4.5) for name in ("revise", "suffix", "restart")}
    again = {name: len(run.executed(since_s=4.5)) for name, run in runs.items()}
    assert again == {"revise": 5, "suffix": 8, "restart": 10}, "the numbers in README.md"
    graph, plan = build().graph(), runs["revise"].plans[0]
    actions = {node.node: node.action for node in plan.nodes}
    notes = {node.node: str(node.evidence.changed and "rules.tier changed") for node in plan.nodes if node.evidence}
    nodes = [
        (name, str(graph.nodes[name].kind), str(actions.get(name, "reuse")), notes.get(name, ""))
        for name in graph.order
    ]
    edges = [
        (parent, child, "control") if (graph.nodes[child].when or ("",))[0] == parent else (parent, child)
        for parent, child in graph.edges()
    ]
    drawn = workflow_svg(nodes, edges, title="supplier: rules.tier changes from standard to strict") + "\n"
    (tmp_path / "plan.svg").write_text(drawn, encoding="utf-8")
    assert _read(ROOT / "docs/plan.svg") == drawn, f"look at {tmp_path}/plan.svg, and copy it to docs/ if right"


def test_the_citation_file_is_well_formed_and_names_the_three_papers():
    citation = YAML(typ="safe").load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "version", "license", "date-released"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert all({"name", "family-names"} & author.keys() for author in citation["authors"])
    papers = citation["references"]
    assert all({"type", "title", "authors", "year", "identifiers"} <= paper.keys() for paper in papers)
    found = sorted(identifier["value"] for paper in papers for identifier in paper["identifiers"])
    assert found == ["arXiv:2604.23283", "arXiv:2609.00643", "arXiv:2609.08015"]


def test_one_version_everywhere():
    citation = YAML(typ="safe").load(ROOT / "CITATION.cff")
    newest = re.search(r"^## \[([\d.]+)\]", _read(ROOT / "CHANGELOG.md"), flags=re.M).group(1)
    assert {revise_lab.__version__, citation["version"], newest} == {PROJECT["version"]}


# --- what is installed -----------------------------------------------------------------------------------------------


def _constraints() -> dict[str, str]:
    lines = _read(ROOT / "constraints.txt").split()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines), "names and versions only"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_constraints_name_every_dependency_at_a_version_in_its_range():
    pinned = _constraints()
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in [Requirement(line) for group in groups for line in group]:
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name}: run make constraints"
        assert requirement.specifier.contains(pinned[name]), f"{requirement}: constraints.txt has {pinned[name]}"


def test_versions_stand_in_one_place():
    environment = YAML(typ="safe").load(ROOT / "environment.yml")
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip == ["--constraint constraints.txt", "--editable .[test]"]
    named = {re.split(r"[=<>]", entry)[0] for entry in environment["dependencies"] if isinstance(entry, str)}
    assert named == {"python", "pip"}


def test_continuous_integration_runs_what_the_readme_names():
    script = _read(ROOT / ".ci/run")
    assert os.access(ROOT / ".ci/run", os.X_OK)
    for command in ("make test", "make slow", "make live", "make postgres", "make browser", "make reproduce"):
        assert command in script


def test_the_diagrams_are_those_of_the_tables():
    from revise_lab.lab.diagram import diagrams

    for name, drawing in diagrams().items():
        assert _read(ROOT / "docs" / name) == drawing, f"python -m revise_lab.lab.diagram docs  ({name})"


# --- what is committed -----------------------------------------------------------------------------------------------


def test_no_link_is_committed():
    links = [path.name for path in _tracked() if path.is_symlink()]
    assert links == [], "a link to an environment would replace the environment of whoever checks it out"


def test_nothing_committed_points_at_one_machine():
    places = [re.escape(part) for part in ("/" + "work/", "/" + "tmp/w", "/" + "root/", "shared" + "/")]
    pattern = re.compile("|".join(places) + r"|/home/(?!me/)\w+/|index-url\s*=?\s*(https?|file):")
    found = []
    for path in _tracked():
        if path.suffix in (".png", ".pdf", ".parquet"):
            continue
        text = path.read_text(errors="replace")
        found += [f"{_named(path)}: {match.group(0)}" for match in pattern.finditer(text)]
    assert not found, found


def test_notebooks_are_committed_without_outputs():
    notebooks = [path for path in _tracked() if path.suffix == ".ipynb"]
    assert notebooks
    for path in notebooks:
        content = json.loads(_read(path))
        assert not {"papermill", "language_info"} & content["metadata"].keys(), path
        for cell in content["cells"]:
            assert not cell.get("outputs"), path
            assert cell.get("execution_count") is None, path
            assert "papermill" not in cell["metadata"], path


def test_no_large_files_are_committed():
    large = {_named(path): path.stat().st_size for path in _tracked() if path.stat().st_size > 500_000}
    assert not large


def _code_lines(path: Path) -> int:
    """Count lines that hold code: neither blank, comment nor docstring."""
    source = _read(path)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    strings = set()
    for node in ast.walk(ast.parse(source)):
        body = node.body if isinstance(node, documented) else []
        for statement in body:  # a string below a field is its docstring
            if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
                strings.update(range(statement.lineno, statement.end_lineno + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def test_lines_of_code_are_counted_as_promised(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Doc."""\n\n# why\nx = 1  # one\n\n\ndef f():\n    """Doc\n    more."""\n    return """a\n    b"""\n'
    )
    assert _code_lines(path) == 4


def test_the_package_is_compact(capsys):
    lines = {path.relative_to(ROOT / "revise_lab"): _code_lines(path) for path in (ROOT / "revise_lab").rglob("*.py")}
    floors: dict[str, int] = {}
    for path, count in lines.items():
        if "scenarios" in (*path.parts, path.stem):  # data: what may happen, and what must come of it
            continue
        floor = path.parts[0].removesuffix(".py")
        floors[floor] = floors.get(floor, 0) + count
    pure = sum(floors[floor] for floor in PURE)
    with capsys.disabled():
        said = ", ".join(f"{floor} {count}" for floor, count in sorted(floors.items()))
        print(f"\nlines of code: {said}; pure floors {pure} (aim 3500), package {sum(floors.values())} (aim 9000)")
    assert pure <= 5_050  # over the aim since effects came; docs/log.md says so
    assert sum(floors.values()) <= 22_000  # far over the aim; docs/log.md says where it is to come down
    assert {str(path): count for path, count in lines.items() if count >= 400} == {}


# --- what importing does ---------------------------------------------------------------------------------------------

IMPORT = """
import sys, time
sys.addaudithook(lambda event, _: sys.exit(event) if event.startswith(("socket.connect", "socket.getaddrinfo")) else None)
start = time.perf_counter()
import revise_lab
took = time.perf_counter() - start
print(took, *sorted(set(sys.modules) & set(sys.argv[1].split(","))), sep=",")
"""


def test_the_import_is_silent_offline_quick_and_light():
    took = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", IMPORT, ",".join(HEAVY)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        seconds, *loaded = done.stdout.strip().split(",")
        assert not loaded
        took.append(float(seconds))
    assert statistics.median(took) < 0.3


def test_the_machine_can_be_used_without_the_laboratory():
    code = "import sys; from revise_lab import Workflow, policy; import revise_lab.core.machine\n"
    code += "print(*sorted(set(sys.modules) & set(sys.argv[1].split(','))))"
    done = subprocess.run([sys.executable, "-c", code, ",".join(HEAVY)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_floors_import_down_only():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
