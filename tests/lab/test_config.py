"""Configs: strict YAML, layers, messages, identity."""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from revise_lab.errors import ConfigError
from revise_lab.lab import experiments
from revise_lab.lab.config import cell_id, cell_seed, load

sys.path.insert(0, str(Path(__file__).parent))

TOY = """\
schema: 1
experiment: toy_lab.counting
title: A toy
paper: {id: "2609.00643", where: Table 0, claim: none}
seed: 7
grid:
  load: [0.5, 1, 1.5]
  policy: [restart, revise]
fixed:
  nodes: 4
replicates: 2
figures: [goodput]
profiles:
  smoke:
    grid: {load: [1.0]}
    replicates: 1
  quick:
    budget_s: 30
  paper:
    replicates: 20
    fixed: {nodes: 10}
"""


@pytest.fixture
def toy(tmp_path):
    """Write the toy config, with some text replaced, and load it."""

    def write(*replacements: tuple[str, str], profile: str = "quick", **options):
        text = TOY
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "toy.yaml"
        path.write_text(text)
        return load(path, profile, **options)

    return write


def grid_of(tmp_path, text: str):
    """Values of grid.mask as the strict reader gives them, one mask each."""
    path = tmp_path / "toy.yaml"
    path.write_text(f"schema: 1\nexperiment: toy_lab.counting\ngrid:\n  mask: [[{text}]]\n")
    return load(path).grid["mask"][0]


# --- YAML 1.2 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["NO", "no", "off", "on", "y", "n", "Yes", "22:22", "None", "inf", "nan"])
def test_words_that_yaml_1_1_turned_into_something_else_are_strings(tmp_path, word):
    assert grid_of(tmp_path, word) == [word]


@pytest.mark.parametrize(
    ("text", "number"), [("1e-3", 0.001), ("1e+3", 1000.0), ("12e03", 12000.0), ("1.0e-3", 0.001), ("2", 2.0)]
)
def test_numbers_are_numbers_in_every_notation(toy, text, number):
    assert toy(("[0.5, 1, 1.5]", f"[{text}]")).cells()[0].params["load"] == number


def test_a_leading_zero_is_decimal_and_0o_is_octal(toy):
    assert toy(("nodes: 4", "nodes: 010")).fixed["nodes"] == 10
    assert toy(("nodes: 4", "nodes: 0o10")).fixed["nodes"] == 8


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        pytest.param("", 1, "empty", id="empty file"),
        pytest.param("# only a comment\n", 1, "empty", id="only comments"),
        pytest.param("schema: 1\n---\nschema: 1\n", 2, "second document", id="two documents"),
        pytest.param("schema: 1\ngrid:\n\tload: [1]\n", 3, "tab", id="tab"),
        pytest.param("schema: 1\nseed: 1\nseed: 2\n", 3, "seed: written twice; first on line 2", id="duplicate"),
        pytest.param("fixed:\n  a: 1\n  'a': 2\n", 3, "fixed.a: written twice", id="quoted duplicate"),
        pytest.param("fixed:\n  '1': 1\n  1: 2\n", 3, "fixed.1: a key is a string", id="1 beside '1'"),
        pytest.param("fixed: {true: 1}\n", 1, "a key is a string", id="boolean key"),
        pytest.param("fixed:\n  x: !!python/object/apply:os.system [ls]\n", 2, "python/object", id="python tag"),
        pytest.param("fixed:\n  x: !!binary aGk=\n", 2, "'binary'", id="binary tag"),
        pytest.param("fixed:\n  x: 2026-11-30\n", 2, "'date' is not accepted; put a text in quotes", id="date"),
        pytest.param("fixed:\n  x: .nan\n", 2, "not a finite number", id="nan"),
        pytest.param("fixed:\n  x: .inf\n", 2, "not a finite number", id="inf"),
        pytest.param("fixed:\n  x: &a [1, *a]\n", 2, "contains itself", id="recursive alias"),
        pytest.param("fixed: &f {x: 1}\ngrid:\n  <<: *f\n", 3, "merge keys", id="merge key"),
        pytest.param("%YAML 1.1\n---\nfixed: {x: no}\n", 1, "YAML 1.2", id="1.1 directive"),
        pytest.param("- 1\n- 2\n", 1, "a config is a mapping, not a list", id="list"),
        pytest.param("fixed: {x: 1\n", 2, "not valid YAML", id="unclosed"),
        pytest.param("fixed:\n  x: !!int no\n", 2, "is not what its tag says", id="wrong tag"),
    ],
)
def test_what_yaml_lets_pass_is_an_error_with_its_line(tmp_path, text, line, says):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml") as caught:
        load(path)
    assert says in caught.value.message
    assert caught.value.line == line
    assert f"bad.yaml:{line}:" in caught.value.message


def test_an_alias_bomb_is_refused_in_time(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="far too many values"):
        load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"title: \xff\xfe\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(path)


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "path", "says"),
    [
        ("title:", "titel:", 3, "titel", "did you mean 'title'?"),
        ("  load: [", "  laod: [", 7, "grid.laod", "did you mean 'load'?"),
        ("  nodes: 4", "  node: 4", 10, "fixed.node", "did you mean 'nodes'?"),
        ("revise]", "revize]", 8, "grid.policy[1]", "allowed: restart, suffix, revise; did you mean 'revise'?"),
        ("[0.5, 1, 1.5]", "[0.5, 1, -1]", 7, "grid.load[2]", "greater than 0, got -1"),
        ("[0.5, 1, 1.5]", "[0.5, '1']", 7, "grid.load[1]", "valid number, got '1'"),
        ("[0.5, 1, 1.5]", "[true]", 7, "grid.load[0]", "got True"),
        ("[0.5, 1, 1.5]", "0.5", 7, "grid.load", "a single one belongs under fixed"),
        ("[0.5, 1, 1.5]", "[]", 7, "grid.load", "leaves no cell"),
        ("grid:\n  load: [0.5, 1, 1.5]\n  policy: [restart, revise]", "grid: []", 6, "grid", "leaves no cell"),
        ("nodes: 4", "nodes: 2.5", 10, "fixed.nodes", "got 2.5"),
        ("nodes: 4", "nodes: 4\n  load: 1.0", 7, "grid.load", "also under fixed.load"),
        ('"2609.00643"', "2609.00643", 4, "paper.id", "put it in quotes"),
        ("claim: none}", "clam: none}", 4, "paper.claim", "is missing (and 1 more)"),
        ("schema: 1", "schema: 2", 1, "schema", "allowed: 1"),
        ("replicates: 2\nfig", "replicates: 0\nfig", 11, "replicates", "greater than or equal to 1"),
        ("  smoke:", "  smok:", 14, "profiles.smok", "did you mean 'smoke'?"),
        ("fixed: {nodes: 10}", "fixed: {nodez: 10}", 21, "fixed.nodez", "did you mean 'nodes'?"),
        ("budget_s: 30", "budget_s: -1", 18, "budget_s", "greater than 0"),
        ("budget_s: 30", "experiment: other", 18, "profiles.quick.experiment", "not changed by a profile"),
        ("title: A toy", "profile: quick", 3, "profile", "chosen when a config is loaded"),
        ("experiment: toy_lab.counting", "experiment: revise_nothing", 2, "experiment", "no experiment is called"),
        (
            "experiment: toy_lab.counting",
            "experiment: .counting",
            2,
            "experiment",
            "no experiment is called '.counting'",
        ),
        ("experiment: toy_lab.counting", "experiment: ../toy", 2, "experiment", "no experiment is called '../toy'"),
        ("experiment: toy_lab.counting\n", "", 1, "experiment", "is missing"),
        ("fixed:\n  nodes: 4", "fixed: 4", 9, "fixed", "got 4"),
        ("[0.5, 1, 1.5]\n  policy: [restart, revise]", "[1]\n  mask: [[a, 3]]", 8, "grid.mask[0][1]", "in quotes"),
    ],
)
def test_an_error_names_file_line_path_and_remedy(toy, old, new, line, path, says):
    with pytest.raises(ConfigError) as caught:
        toy((old, new))
    error = caught.value
    assert says in error.message
    assert error.path in (path, f"profiles.quick.{path}", f"profiles.paper.{path}")
    assert (error.line, f"toy.yaml:{line}:" in error.message) == (line, True)


def test_a_wrong_override_is_named_as_such(toy):
    with pytest.raises(ConfigError, match=r"override grid\.laod: no such parameter.*did you mean 'load'") as caught:
        toy(overrides={"grid.laod": [1.0]})
    assert caught.value.line is None
    with pytest.raises(ConfigError, match=r"override grid\.load\[1\]: .*got -2"):
        toy().with_(grid__load=[1.0, -2])
    with pytest.raises(ConfigError, match=r"override grdi: no such name.*did you mean 'grid'") as caught:
        toy(overrides={"grdi.load": [1.0]})
    assert caught.value.line is None
    for path in ("grid.load.x", "fixed.nodes.x"):
        with pytest.raises(ConfigError, match=rf"override {path}: the value of a parameter is whole; set \w+\.\w+$"):
            toy(overrides={path: 1})
    with pytest.raises(ConfigError, match="write path=value"):
        toy(overrides=["grid.load"])
    with pytest.raises(ConfigError, match="JSON-like"):
        toy().with_(fixed__nodes=object())
    with pytest.raises(ConfigError, match="JSON-like"):
        toy().with_(fixed__nodes=float("nan"))
    with pytest.raises(ConfigError, match="not changed by an override"):
        toy().with_(experiment="toy_lab.plain")


def test_an_unknown_profile_lists_the_three(toy):
    with pytest.raises(ConfigError, match="allowed: smoke, quick, paper; did you mean 'paper'"):
        toy(profile="papre")


def test_errors_cross_processes(toy):
    with pytest.raises(ConfigError) as caught:
        toy(("title:", "titel:"))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.message, copy.line, copy.nearest) == (caught.value.message, 3, "title")


# --- finding ---------------------------------------------------------------------------------------------------------


def test_a_config_is_found_by_name_in_the_folder_that_is_set(tmp_path, monkeypatch):
    (tmp_path / "toy.yaml").write_text(TOY)
    assert load("toy", configs_dir=tmp_path).title == "A toy"
    monkeypatch.setenv("REVISE_LAB_CONFIGS", str(tmp_path))
    assert load("toy").title == "A toy"
    monkeypatch.delenv("REVISE_LAB_CONFIGS")
    (tmp_path / "configs").mkdir()
    (tmp_path / "toy.yaml").rename(tmp_path / "configs" / "toy.yaml")
    monkeypatch.chdir(tmp_path)
    assert load("toy").title == "A toy"


def test_a_config_not_found_lists_what_was_tried_and_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "toy.yaml").write_text(TOY)
    with pytest.raises(ConfigError, match="did you mean 'toy'") as caught:
        load("toi", configs_dir=tmp_path)
    assert caught.value.tried == (str(tmp_path / "toi.yaml"),)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load("zzz")
    assert len(caught.value.tried) == 2


def test_experiments_are_checked_when_they_are_asked_for():
    with pytest.raises(ConfigError, match=r"COLUMNS repeats \['load'\]"):
        experiments.get("toy_lab.broken")
    with pytest.raises(ConfigError, match="does not define ALGORITHM_VERSION"):
        experiments.get("json.decoder")
    with pytest.raises(ConfigError, match="'a_package_that_nobody_has', which is not installed"):
        experiments.get("toy_lab.needy")
    with pytest.raises(ConfigError, match=r"no experiment is called 'toy_lab\.nothing'"):
        experiments.get("toy_lab.nothing")
    assert not any(name.startswith("_") for name in experiments.names())


# --- layers ----------------------------------------------------------------------------------------------------------


def test_a_profile_merges_mappings_and_replaces_lists(toy):
    smoke = toy(profile="smoke")
    assert dict(smoke.grid) == {"load": (1.0,), "policy": ("restart", "revise")}
    assert (smoke.replicates, smoke.budget_s, len(smoke.cells())) == (1, None, 2)
    assert toy(profile="quick").budget_s == 30
    assert toy(profile="paper").fixed == {"nodes": 10}


def test_an_override_may_bring_the_grid_that_a_file_has_not(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text("schema: 1\nexperiment: toy_lab.counting\n")
    config = load(path, overrides={"grid.load": [0.5, 1.0]})
    assert [cell.params["load"] for cell in config.cells()] == [0.5, 1.0]
    assert config.origins["grid.load"] == "override"


def test_overrides_come_last_in_each_of_their_forms(toy):
    expected = [1.0, 2.0]
    for config in (
        toy(overrides={"grid.load": [1.0, 2.0]}),
        toy(overrides=["grid.load=[1.0, 2.0]"]),
        toy().with_(grid__load=[1.0, 2.0]),
        toy().with_(grid__load=np.array([1.0, 2.0])),
        toy().with_(grid__load=(1, 2)).with_(title="kept"),
    ):
        assert list(config.grid["load"]) == expected
    assert toy(overrides=["seed=3", "title='a: b'"]).title == "a: b"


def test_a_later_layer_moves_a_parameter_between_grid_and_fixed(toy):
    swept = toy().with_(grid__nodes=[1, 2])
    assert (swept.fixed, swept.grid["nodes"], len(swept.cells())) == ({}, (1, 2), 24)
    held = toy().with_(fixed__load=0.5)
    assert set(held.grid) == {"policy"}
    assert {cell.params["load"] for cell in held.cells()} == {0.5}


def test_the_origin_of_each_value_is_kept(toy):
    config = toy(profile="smoke", overrides={"seed": 3})
    origins = config.origins
    assert origins["seed"] == "override"
    assert origins["grid.load"] == "profile"
    assert origins["grid.policy"] == "file"
    assert origins["budget_s"] == "default"
    assert origins["params.mask"] == "default"
    assert "params.load" not in origins
    assert config.overrides == {"seed": 3}


def test_a_config_cannot_be_changed_in_place(toy):
    config = toy()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    with pytest.raises(TypeError, match="with_"):
        config.grid["load"] = [9.0]
    with pytest.raises(TypeError, match="with_"):
        config.cells()[0].params.update(load=9.0)
    assert pickle.loads(pickle.dumps(config)).hash == config.hash


# --- identity --------------------------------------------------------------------------------------------------------


def test_several_grids_are_a_union_without_repetition(toy):
    grids = "grid:\n  - {load: [0.5, 1], policy: [restart, revise]}\n  - {load: [1, 2], policy: [revise]}\n"
    old = "grid:\n  load: [0.5, 1, 1.5]\n  policy: [restart, revise]\n"
    config = toy((old, grids), ("replicates: 2", "replicates: 1"), ("    grid: {load: [1.0]}\n", ""))
    assert [(cell.params["load"], cell.params["policy"]) for cell in config.cells()] == [
        (0.5, "restart"),
        (0.5, "revise"),
        (1.0, "restart"),
        (1.0, "revise"),
        (2.0, "revise"),
    ]
    assert len(config.with_(grid__policy=["suffix"]).cells()) == 3
    with pytest.raises(ConfigError, match=r"no grid has this parameter; allowed: load, policy; did you mean 'policy'"):
        config.with_(grid__polcy=["suffix"])
    with pytest.raises(ConfigError, match=r"override grid\[0\]\.policy\[0\]: got 'x'"):
        config.with_(grid__policy=["x"], fixed__nodes=2)


def test_the_policy_is_not_in_the_seed_and_everything_else_is(toy):
    cells = toy().cells()
    by = {(c.params["load"], c.params["policy"], c.replicate): c for c in cells}
    assert len(by) == len({cell.id for cell in cells}) == 12
    for load_, _, replicate in by:
        assert by[load_, "restart", replicate].seed == by[load_, "revise", replicate].seed
    assert len({cell.seed for cell in cells}) == 6
    assert {c.seed for c in toy().with_(seed=8).cells()}.isdisjoint(c.seed for c in cells)


def test_an_id_is_a_function_of_content_and_can_be_recomputed_from_a_row(toy):
    cells = toy().cells()
    for cell in cells:
        assert cell.id == cell_id("toy_lab.counting", dict(cell.params), cell.replicate, cell.seed, 1)
        workload = {name: value for name, value in reversed(cell.params.items()) if name != "policy"}
        assert cell.seed == cell_seed(7, workload, cell.replicate)
    # pinned: a change of these words means that every stored result is computed again
    assert (cells[0].id, cells[0].seed) == PINNED
    assert cell_id("toy_lab.counting", dict(cells[0].params), 0, cells[0].seed, 2) != cells[0].id


PINNED = ("495894c3c72e9cde", 4786711595252294954)


def test_one_knob_changed_leaves_the_ids_of_the_other_cells(toy):
    before, after = ({c.id for c in config.cells()} for config in (toy(), toy().with_(grid__load=[1, 1.5, 2.0])))
    assert len(before & after) == 8
    smoke = {c.id for c in toy(profile="smoke").cells()}
    assert smoke < before
    assert len(smoke) == 2


@pytest.mark.parametrize("change", [{"title": "other"}, {"figures": []}, {"budget_s": 5}, {"source": "measured"}])
def test_the_hash_ignores_what_cannot_change_a_result(toy, change):
    assert toy().with_(**change).hash == toy().hash
    assert toy().with_(grid__load=[1.5, 1.0, 0.5, 1.0]).hash == toy().hash


@pytest.mark.parametrize("change", [{"seed": 8}, {"replicates": 3}, {"fixed__nodes": 5}, {"grid__load": [1.0]}])
def test_the_hash_sees_what_can(toy, change):
    assert toy().with_(**change).hash != toy().hash
    assert len(toy().hash) == 8


def test_a_new_algorithm_version_is_a_new_hash(toy):
    assert toy(("toy_lab.counting", "toy_lab.plain")).hash != toy().hash


def test_resolved_is_plain_json(toy):
    resolved = toy(profile="smoke").resolved()
    assert json.loads(json.dumps(resolved)) == resolved
    assert (resolved["schema"], resolved["profile"], resolved["replicates"]) == (1, "smoke", 1)
    assert "profiles" not in resolved


@pytest.mark.parametrize("url", ["http://me:secret@there/v1", "http://there/v1,http://there:2/v1?key=secret"])
def test_a_url_that_may_hold_a_secret_is_refused_wherever_it_stands(url):
    grid = {"app": ["supplier"], "revision": ["country"], "endpoint": ["emulated", url]}
    for change in ({"fixed__endpoint": url}, {"grid": [grid]}):
        with pytest.raises(ConfigError, match=r"a key goes into REVISE_LAB_API_KEY") as caught:
            load("revise_langgraph").with_(**change)
        assert "secret" not in str(caught.value)


def test_what_a_real_endpoint_answers_is_measured():
    config = load("revise_langgraph")
    assert config.source == config.with_(fixed__endpoint="emulated").source == "emulated"
    assert config.with_(fixed__endpoint="http://there/v1").source == "measured"
    serving = load("revise_serving")
    assert (serving.exclusive, serving.with_(fixed__endpoint="http://there/v1").exclusive) == (False, True)
