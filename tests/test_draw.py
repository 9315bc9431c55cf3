"""Drawings say the same by colour, symbol and word, survive hostile text and are equal byte for byte."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest

from revise_lab.draw import STYLES, table_html, table_text, timeline_svg, workflow_svg, workflow_text
from revise_lab.errors import WorkflowError

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("company", "costs", "policy", "goal", "evidence", "assess", "screening", "reviewer", "join", "report")
EDGES = [
    ("company", "screening"),
    ("policy", "assess", "control"),
    ("goal", "assess"),
    ("evidence", "assess"),
    ("assess", "reviewer"),
    ("costs", "join"),
    ("screening", "join"),
    ("reviewer", "join"),
    ("join", "report"),
    ("policy", "report"),
]


def _nodes(state="pending", note="", **states):
    return [(name, "model", states.get(name, state), note) for name in NAMES]


def _groups(svg):
    return {g.get("data-node"): g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("data-node")}


def _boxes(svg):
    number = ("x", "y", "width", "height")
    return {name: tuple(float(g.find(f"{SVG}rect").get(k)) for k in number) for name, g in _groups(svg).items()}


@pytest.mark.parametrize("state", sorted(STYLES))
def test_each_state_has_a_colour_a_symbol_and_a_word(state):
    group = _groups(workflow_svg([("a", "model", state, "")], []))["a"]
    texts = [text.text for text in group.iter(f"{SVG}text")]
    assert group.get("data-state") == state
    assert group.find(f"{SVG}rect").get("fill") == STYLES[state].fill
    assert STYLES[state].symbol in texts
    assert any(state in text for text in texts)


def test_node_states_and_plan_actions_differ_in_symbol():
    for group in (
        ("pending", "running", "finished", "committed", "skipped", "failed", "aborted", "cancelled", "rejected"),
        ("cancel", "avoid", "recompute", "continue", "reuse"),
        ("completed", "aborted", "recomputed"),
    ):
        assert len({STYLES[state].symbol for state in group}) == len(group)


def test_a_state_that_nobody_listed_is_drawn_under_its_own_name():
    group = _groups(workflow_svg([("a", "model", "hibernating", "")], []))["a"]
    assert any("hibernating" in text.text for text in group.iter(f"{SVG}text"))
    assert group.get("data-state") == "hibernating"


def test_a_caller_may_choose_the_fill():
    svg = workflow_svg([("a", "model", "running", "")], [], colours={"running": "#123456"})
    assert _groups(svg)["a"].find(f"{SVG}rect").get("fill") == "#123456"


def test_a_change_of_state_recolours_and_moves_nothing():
    before = workflow_svg(_nodes(), EDGES)
    after = workflow_svg(_nodes("committed", note="a note", report="running"), EDGES)
    assert _boxes(before) == _boxes(after)
    assert _groups(after)["report"].get("data-state") == "running"
    assert _groups(after)["costs"].find(f"{SVG}rect").get("fill") != _groups(before)["costs"].find(f"{SVG}rect").get(
        "fill"
    )


def test_boxes_keep_apart_and_parents_stand_left_of_children():
    boxes = _boxes(workflow_svg(_nodes(), EDGES))
    for (ax, ay, width, height), (bx, by, *_) in combinations(boxes.values(), 2):
        assert abs(ax - bx) >= width or abs(ay - by) >= height
    for parent, child, *_ in EDGES:
        assert boxes[parent][0] < boxes[child][0]


def test_a_long_edge_is_led_round_the_boxes_that_it_passes():
    svg = workflow_svg(_nodes(), EDGES)
    boxes = _boxes(svg)
    level_runs = [
        (float(y), float(end))
        for path in re.findall(r'<path d="(M[^"]*H[^"]*)"', svg)
        for y, end in re.findall(r" ([\d.]+)H([\d.]+)", path)
    ]
    assert level_runs
    for y, end in level_runs:
        for x, top, width, height in boxes.values():
            assert not (x < end <= x + width and top < y < top + height)


def test_no_two_edges_cross_where_a_planar_drawing_exists():
    nodes = [(name, "model", "pending", "") for name in "abcxyz"]
    y = {name: box[1] for name, box in _boxes(workflow_svg(nodes, [("a", "z"), ("b", "y"), ("c", "x")])).items()}
    assert sorted("abc", key=y.__getitem__) == sorted("abc", key=lambda n: y[{"a": "z", "b": "y", "c": "x"}[n]])


def test_drawings_have_a_role_a_title_a_summary_and_no_ids():
    root = ElementTree.fromstring(workflow_svg(_nodes(report="running"), EDGES, title="supplier"))
    assert root.get("role") == "img"
    assert root[0].tag == f"{SVG}title"
    assert root[0].text == "supplier"
    assert root[1].text == "10 nodes: 9 pending, 1 running"
    assert not [e for e in root.iter() if "id" in e.attrib or e.tag == f"{SVG}style"]


@pytest.mark.parametrize(
    "hostile",
    [
        "</text><script>alert(1)</script>",
        "a & b \"c\" 'd'",
        "nul\x00 bell\x07 esc\x1b[31m",
        "lone \ud800",
        "two\nlines",
    ],
    ids=["markup", "quotes", "control", "surrogate", "newline"],
)
def test_text_is_escaped_and_shown(hostile):
    nodes = [("n" + hostile, "model", "running", hostile), ("m", hostile, hostile, "")]
    svg = workflow_svg(nodes, [("n" + hostile, "m")], title=hostile)
    svg.encode("utf-8")
    assert not [e for e in ElementTree.fromstring(svg).iter() if "script" in e.tag]
    bars = timeline_svg([(hostile, 0.0, 1.0, hostile, hostile)], marks=[(0.5, hostile)], title=hostile)
    html = table_html([(hostile,)], (hostile,), caption=hostile)
    for document in (bars, html):
        assert not [e for e in ElementTree.fromstring(document).iter() if "script" in e.tag]
    for text in (workflow_text(nodes, [("n" + hostile, "m")], title=hostile), table_text([(hostile,)], (hostile,))):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert len(table_text([(hostile,)], ("text",)).splitlines()) == 3


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        (("a", "b"), [("a", "b"), ("b", "a")], "cycle among or above a, b"),
        (("a",), [("a", "a")], "cycle"),
        (("a", "a"), [], "used twice: a"),
        (("a",), [("a", "ghost")], "'ghost'"),
        (("a",), [("ghost", "a")], "'ghost'"),
    ],
    ids=["cycle", "self", "twice", "no child", "no parent"],
)
def test_what_is_no_workflow_is_refused_by_name(nodes, edges, message):
    tuples = [(name, "model", "pending", "") for name in nodes]
    for draw in (workflow_svg, workflow_text):
        with pytest.raises(WorkflowError, match=message):
            draw(tuples, edges)


def test_nothing_to_draw_is_a_drawing_too():
    assert "no nodes" in workflow_svg([], [])
    assert "no attempts" in timeline_svg([])
    assert workflow_text([], []).startswith("workflow: no nodes")
    assert ElementTree.fromstring(table_html([], ("a",))).tag == "table"
    assert table_text([], ("a", "bb")) == "a  bb\n-  --"


def test_the_text_form_lists_parents_first_with_states_and_control_edges():
    nodes = list(reversed(_nodes("reuse", assess="recompute", report="cancel")))
    lines = workflow_text(nodes, EDGES, title="supplier").splitlines()
    assert lines[0] == "supplier: 1 cancel, 1 recompute, 8 reuse"
    order = [line.split()[1] for line in lines[3:]]
    assert sorted(order) == sorted(NAMES)
    assert all(order.index(edge[0]) < order.index(edge[1]) for edge in EDGES)
    assert next(line for line in lines if " assess " in line).split(None, 4)[4] == "policy*, goal, evidence"
    assert next(line for line in lines if " assess " in line).startswith("↻")


def test_a_text_table_aligns_numbers_right_and_wide_letters_by_columns():
    table = table_text([("a", 1.0, None), ("表", 12.3456, 7)], ("name", "value", "n"))
    assert table.splitlines() == ["name  value  n", "----  -----  -", "a         1", "表    12.35  7"]


def test_html_cells_are_aligned_by_type():
    html = table_html([("a", 2.5, True, None)], ("w", "x", "y", "z"), caption="Calls")
    assert html.count("text-align:right") == 1
    assert '<td style="text-align:right">2.5</td>' in html
    assert "<caption>Calls</caption>" in html


def test_the_timeline_places_bars_by_time_on_one_lane_a_node():
    spans = [("a", 0.0, 1.0, "completed"), ("b", 1.0, 2.0, "aborted", "cut"), ("a", 2.0, 4.0, "recomputed")]
    svg = timeline_svg(spans, marks=[(2.0, "revision r1")])
    bars = [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("data-node")]
    boxes = [{k: float(g.find(f"{SVG}rect").get(k)) for k in ("x", "y", "width")} for g in bars]
    by_state = {g.get("data-state"): box for g, box in zip(bars, boxes, strict=True)}
    assert by_state["completed"]["y"] == by_state["recomputed"]["y"] != by_state["aborted"]["y"]
    assert by_state["recomputed"]["width"] == pytest.approx(2 * by_state["completed"]["width"], abs=0.2)
    assert by_state["aborted"]["x"] == pytest.approx(
        by_state["completed"]["x"] + by_state["completed"]["width"], abs=0.2
    )
    assert "revision r1 (2 s)" in svg
    assert "completed (1)" in svg


@pytest.mark.parametrize("times", [(0.0, 0.0), (5.0, 5.0), (1e-9, 2e-9), (-3.0, 4e6)])
def test_any_range_of_times_gets_a_few_ticks(times):
    svg = timeline_svg([("a", *times, "completed")])
    assert 1 <= svg.count('stroke="#e3e3e3"') <= 12
    assert "nan" not in svg


def test_bytes_do_not_depend_on_the_process():
    code = (
        "import sys; from revise_lab.draw import workflow_svg as w; names = list('qwertyuiop');"
        "sys.stdout.write(w([(n, 'model', 'running', '') for n in names], "
        "[(a, b) for a in names for b in names if a < b and (ord(a) * ord(b)) % 3 == 0]))"
    )
    drawn = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(drawn) == 1
    assert drawn.pop().startswith(b"<svg")
