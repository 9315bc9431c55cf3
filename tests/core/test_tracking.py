"""Recording views: every way of reading is recorded, degrades the attempt or raises; what is not recorded cannot matter."""

from __future__ import annotations

import array
import ast
import asyncio
import bisect
import collections
import copy
import copyreg
import csv
import dataclasses
import functools
import heapq
import io
import itertools
import json
import marshal
import operator
import pickle
import pprint
import string
import sys
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from revise_lab.core.containers import ArrView, DictView, ObjView
from revise_lab.core.tracking import Coverage, Group, Recorder, StateView, thawed
from revise_lab.core.unread import UNREAD
from revise_lab.errors import ReadOnlyState, UndeclaredRead, UntrackableRead, ValueNotCanonical
from revise_lab.records.selector import Marker, Path, Role, Selector, delta_between, evaluate, meets
from revise_lab.records.value import ABSENT, Arr, Obj, Value, canonical_text, equal, freeze, thaw

PLAIN: dict[str, Any] = {
    "a": 1,
    "b": {"x": 2, "y": []},
    "l": [30, 10, 20],
    "m": [{"n": 5}, {"n": 6}],
    "t": "hi",
    "true": True,
    "z": {},
}


def view_of(plain: Any, recorder: Recorder | None = None) -> tuple[Any, Recorder]:
    """Return a view of an input ``r`` and its recorder."""
    recorder, root = recorder or Recorder(), freeze(plain)
    state = StateView(recorder, lambda name: root, inputs=["r"])
    return state["r"], recorder


def seen(recorder: Recorder, skip: int = 1) -> list[str]:
    """Return what was recorded, as text without the artifact; the walk to the root goes first."""
    return [str(selector).removeprefix("r").removeprefix(".") for selector in list(recorder.reads)[skip:]]


class Model(pydantic.BaseModel):
    x: int
    w: str = "default"


@dataclasses.dataclass
class Holder:
    held: Any


def by_match(v: Any) -> Any:
    match v:
        case {"b": {"x": int(x)}}:
            return x


def by_list_match(v: Any) -> Any:
    match v["l"]:
        case [first, *_rest]:
            return first


def error_of(act: Callable[[], Any]) -> type[BaseException] | None:
    try:
        act()
    except Exception as error:
        return type(error)
    return None


def keyword(**kwargs: Any) -> int:
    return int(kwargs["x"])


def in_thread(v: Any) -> Any:
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(v["b"]["x"]))
    worker.start()
    worker.join()
    return found


def by_generator(v: Any) -> Any:
    return next(x for x in (key + "!" for key in v["b"]))


def added_in_place(v: Any) -> Any:
    target = [1]
    alias = target
    target += v["l"]
    return alias


def csv_row(v: Any) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(v["l"])
    return out.getvalue()


# What a walk through l, b or m leaves behind.
L = "l.#kind"
B = "b.#kind"
M = "m.#kind"
EACH_L = f"{L} l.#members l[0] l[1] l[2]"
EACH_B = f"{B} b.#members b.x b.y.#kind"
TOP = "#members a b.#kind l.#kind m.#kind t true z.#kind"

READS: list[tuple[str, Callable[[Any], Any], str]] = [
    # leaves and walks
    ("leaf", lambda v: v["a"], "a"),
    ("same leaf twice", lambda v: (v["a"], v["a"]), "a"),
    ("deep leaf", lambda v: v["b"]["x"], f"{B} b.x"),
    ("container only", lambda v: bool(v["b"] is not None), B),
    ("get present", lambda v: v.get("b").get("x"), f"{B} b.x"),
    ("bool leaf stays bool", lambda v: v["true"] is True, "true"),
    ("str subclass key", lambda v: v[Marker("a" and "value")] if "value" in v else v["a"], "#has:value a"),
    ("__getitem__", lambda v: v.__getitem__("a"), "a"),
    ("itemgetter", lambda v: operator.itemgetter("a", "t")(v), "a t"),
    ("reduce getitem", lambda v: functools.reduce(operator.getitem, ["b", "x"], v), f"{B} b.x"),
    ("compound expression (C23)", lambda v: (v["a"] + v["b"]["x"]).imag, f"a {B} b.x"),
    ("ChainMap", lambda v: collections.ChainMap({}, v)["a"], "a"),
    ("MappingProxyType", lambda v: types.MappingProxyType(v)["a"], "a"),
    ("format_map", lambda v: "{a}".format_map(v), "a"),
    ("format_map nested", lambda v: "{b[x]}".format_map(v), f"{B} b.x"),
    ("format argument", lambda v: "{0[a]}".format(v), "a"),  # noqa: UP030, UP032
    ("percent", lambda v: "%(a)s" % v, "a"),  # noqa: UP031
    ("Template", lambda v: string.Template("$a").substitute(v), "a"),
    ("Formatter", lambda v: string.Formatter().vformat("{a}", (), v), "a"),
    ("eval locals", lambda v: eval("a", {}, v), "a"),
    ("eval globals", lambda v: eval("a", v), "a"),
    ("dict.__getitem__", lambda v: dict.__getitem__(v, "a"), "a"),
    ("thread", in_thread, f"{B} b.x"),
    ("dataclass field", lambda v: Holder(v).held["a"], "a"),
    ("closure", lambda v: (lambda: v["a"])(), "a"),
    ("match", by_match, f"#members {B} b.#members b.x"),
    # absence and presence
    ("in, present", lambda v: "a" in v, "#has:a"),
    ("in, absent (C17)", lambda v: "coupon" in v, "#has:coupon"),
    ("in, not a string", lambda v: (1 in v, None in v), ""),
    ("get absent (C17)", lambda v: v.get("coupon", 7), "#has:coupon"),
    ("get not a string", lambda v: v.get(1, 7), ""),
    ("absent key", lambda v: error_of(lambda: v["no"]), "#has:no"),
    ("in keys()", lambda v: "a" in v["b"].keys(), f"{B} b.#members"),  # noqa: SIM118
    ("hasattr (C17)", lambda v: hasattr(v, "a"), ""),
    # members
    ("len", lambda v: len(v["b"]), f"{B} b.#members"),
    ("bool", lambda v: bool(v["z"]), "z.#kind z.#members"),
    ("not", lambda v: not v["l"], f"{L} l.#members"),
    ("for", lambda v: [key for key in v["b"]], f"{B} b.#members"),
    ("generator", by_generator, f"{B} b.#members"),
    ("keys (C18)", lambda v: list(v["b"].keys()), f"{B} b.#members"),
    ("keys repr", lambda v: repr(v["b"].keys()), f"{B} b.#members"),
    ("keys and", lambda v: v["b"].keys() & {"x"}, f"{B} b.#members"),
    ("sorted", lambda v: sorted(v["b"], reverse=True), f"{B} b.#members"),
    ("set", lambda v: set(v["b"]), f"{B} b.#members"),
    ("reversed", lambda v: list(reversed(v["b"])), f"{B} b.#members"),
    ("star", lambda v: [*v["b"]], f"{B} b.#members"),
    ("dict.fromkeys", lambda v: dict.fromkeys(v["b"], 0), f"{B} b.#members"),
    ("ChainMap len", lambda v: len(collections.ChainMap(v["b"], {})), f"{B} b.#members"),
    # members and each element, as a loop would
    ("items", lambda v: copy.deepcopy(next(iter(v["b"].items()))), f"{B} b.#members b.x"),
    ("items len", lambda v: len(v["b"].items()), f"{B} b.#members"),
    ("item in items", lambda v: ("x", 2) in v["b"].items(), f"{B} b.x"),
    ("items repr", lambda v: repr(v["b"].items()), f"{EACH_B} b.y"),
    ("items reversed", lambda v: next(reversed(v["b"].items()))[0], f"{B} b.#members b.y.#kind"),
    ("values", lambda v: next(iter(v["b"].values())), f"{B} b.#members b.x"),
    ("values reversed", lambda v: len(next(reversed(v["b"].values()))), f"{B} b.#members b.y.#kind b.y.#members"),
    ("values sum", lambda v: sum(len(str(x)) for x in v["b"].values()), f"{EACH_B} b.y"),
    ("values repr", lambda v: repr(v["b"].values()), f"{EACH_B} b.y"),
    ("dict()", lambda v: len(dict(v["b"])), EACH_B),
    ("dict() then deeper", lambda v: dict(v)["b"]["x"], f"{TOP} b.x"),
    ("{**x}", lambda v: len({**v["b"]}), EACH_B),
    ("f(**x)", lambda v: keyword(**v["b"]), EACH_B),
    ("partial(**x)", lambda v: functools.partial(keyword, **v["b"])(), EACH_B),
    ("format(**x)", lambda v: "{x}".format(**v["b"]), EACH_B),
    ("SimpleNamespace", lambda v: types.SimpleNamespace(**v["b"]).x, EACH_B),
    ("OrderedDict", lambda v: len(collections.OrderedDict(v["b"])), EACH_B),
    ("UserDict", lambda v: len(collections.UserDict(v["b"])), EACH_B),
    ("update", lambda v: ({}, {}.update(v["b"]))[0], EACH_B),
    ("type() namespace", lambda v: type("X", (), v["b"]).x, EACH_B),
    ("dict.copy", lambda v: len(dict.copy(v["b"])), EACH_B),
    ("dict.__or__", lambda v: len(dict.__or__(v["b"], {})), EACH_B),
    ("json.dumps list", lambda v: json.dumps(v["l"]), EACH_L),
    ("json.dumps", lambda v: json.dumps(v["b"]), f"{EACH_B} b.y.#members"),
    ("json.dumps empty", lambda v: json.dumps(v["z"]), "z.#kind z.#members"),
    ("json.dumps indent", lambda v: json.dumps(v["b"], indent=1), f"{EACH_B} b.y.#members"),
    ("json.dumps sort", lambda v: json.dumps(v["b"], sort_keys=True), f"{EACH_B} b.y.#members"),
    ("json.dump", lambda v: json.dump(v["b"], io.StringIO()), f"{EACH_B} b.y.#members"),
    ("asdict", lambda v: dataclasses.asdict(Holder(v["b"])), f"{EACH_B} b.y.#members"),
    ("type(x)(x)", lambda v: type(v["l"])(v["l"]), EACH_L),
    # the whole
    ("copy.copy", lambda v: copy.copy(v["b"]), f"{B} b"),
    ("copy.deepcopy (C15)", lambda v: copy.deepcopy(v["b"]), f"{B} b"),
    (".copy()", lambda v: v["b"].copy(), f"{B} b"),
    ("list.copy()", lambda v: v["l"].copy(), f"{L} l"),
    ("deepcopy in a list", lambda v: copy.deepcopy([v["b"], v["l"]]), f"{B} {L} b l"),
    ("pickle", lambda v: pickle.loads(pickle.dumps(v["b"])), f"{B} b"),
    ("pickle 0", lambda v: pickle.loads(pickle.dumps(v["b"], 0)), f"{B} b"),
    ("pickle in Python", lambda v: pickle.loads(pickle._dumps(v["l"])), f"{L} l"),
    ("repr", lambda v: repr(v["b"]), f"{B} b"),
    ("str", lambda v: str(v["l"]), f"{L} l"),
    ("f-string", lambda v: f"{v['b']}", f"{B} b"),
    ("format", lambda v: format(v["b"]), f"{B} b"),
    ("percent s", lambda v: "%s" % v["l"], f"{L} l"),  # noqa: UP031
    ("pformat", lambda v: pprint.pformat(v["b"]), f"{B} b"),
    ("literal_eval", lambda v: ast.literal_eval(str(v["b"])), f"{B} b"),
    ("eq", lambda v: v["b"] == {"x": 2, "y": []}, f"{B} b"),
    ("eq reflected", lambda v: {"x": 2.0, "y": []} == v["b"], f"{B} b"),  # noqa: SIM300
    ("eq two views", lambda v: v["l"] == v["l"][:], f"{L} l.#members l[0] l[1] l[2] l"),
    ("eq nested", lambda v: [v["b"]] == [{"x": 2, "y": []}], f"{B} b"),
    ("eq other kind", lambda v: (v["b"] == 3, v["b"] is None), B),
    ("ne", lambda v: v["b"] != {"x": 3}, f"{B} b"),
    ("ne list", lambda v: v["l"] != [30, 10, 20], f"{L} l"),
    ("or", lambda v: v["b"] | {"x": 0}, f"{B} b"),
    ("ror", lambda v: {"x": 0} | v["b"], f"{B} b"),
    ("or two views", lambda v: v["b"] | v["z"], f"{B} z.#kind b z"),
    ("set of items", lambda v: {"q": 1, **(v["b"] | {})}, f"{B} b"),
    ("__getstate__", lambda v: bool(v["b"].__getstate__()) or True, f"{B} b"),
    ("model_validate", lambda v: Model.model_validate(v["b"]).x, f"{B} b.x b.#has:w"),
    ("TypeAdapter(dict)", lambda v: len(pydantic.TypeAdapter(dict).validate_python(v["b"])), EACH_B),
    # lists
    ("element", lambda v: v["l"][1], f"{L} l[1]"),
    ("element by bool", lambda v: v["l"][True], f"{L} l[1]"),
    ("element by numpy integer", lambda v: v["l"][np.int64(1)], f"{L} l[1]"),
    ("element of a list of objects", lambda v: v["m"][1]["n"], f"{M} m[1].#kind m[1].n"),
    ("negative index", lambda v: v["l"][-1], f"{L} l.#members l[2]"),
    ("past the end", lambda v: error_of(lambda: v["l"][7]), f"{L} l.#has:7"),
    ("before the start", lambda v: error_of(lambda: v["l"][-9]), f"{L} l.#members"),
    ("not an index", lambda v: error_of(lambda: v["l"]["0"]), L),
    ("slice inside", lambda v: v["l"][0:2], f"{L} l[0] l[1]"),
    ("slice past the end", lambda v: v["l"][1:9], f"{L} l[1] l[2] l.#has:3"),
    ("slice beyond the end", lambda v: v["l"][5:9], f"{L} l.#has:5"),
    ("slice empty", lambda v: v["l"][2:1], L),
    ("slice open", lambda v: v["l"][1:], f"{L} l.#members l[1] l[2]"),
    ("slice negative", lambda v: v["l"][0:-1], f"{L} l.#members l[0] l[1]"),
    ("slice step", lambda v: v["l"][0:3:2], f"{L} l[0] l[2]"),
    ("slice reversed", lambda v: v["l"][::-1], f"{L} l.#members l[2] l[1] l[0]"),
    ("list()", lambda v: list(v["l"]), EACH_L),
    ("tuple()", lambda v: tuple(v["l"]), EACH_L),
    ("sorted list", lambda v: sorted(v["l"]), EACH_L),
    ("sum", lambda v: sum(v["l"]), EACH_L),
    ("max", lambda v: max(v["l"]), EACH_L),
    ("any stops early", lambda v: any(x > 5 for x in v["l"]), f"{L} l.#members l[0]"),
    ("unpack", lambda v: [x for x, *_ in [v["l"]]], EACH_L),
    ("match list", by_list_match, f"{L} l.#members l[0] l[1] l[2]"),
    ("enumerate", lambda v: next(enumerate(v["l"])), f"{L} l.#members l[0]"),
    ("zip", lambda v: list(zip(v["l"], "ab", strict=False)), EACH_L),
    ("reversed list", lambda v: next(reversed(v["l"])), f"{L} l.#members l[2]"),
    ("join", lambda v: ",".join(map(str, v["l"])), EACH_L),
    ("deque", lambda v: collections.deque(v["l"], 1).pop(), EACH_L),
    ("islice", lambda v: list(itertools.islice(v["l"], 1)), f"{L} l.#members l[0]"),
    ("bisect", lambda v: bisect.bisect([1], 1) + bisect.bisect(v["l"], 99), f"{L} l.#members l[1] l[2]"),
    ("nsmallest", lambda v: heapq.nsmallest(1, v["l"]), EACH_L),
    ("bytes", lambda v: bytes(v["l"]), EACH_L),
    ("csv", csv_row, EACH_L),
    ("numpy", lambda v: np.asarray(v["l"]).tolist(), EACH_L),
    ("in list (C21)", lambda v: 20 in v["l"], f"{L} l"),
    ("view in list (C21)", lambda v: v["m"][0] in v["m"], f"{M} m[0].#kind m m[0]"),
    ("index of a view (C21)", lambda v: v["m"].index(v["m"][1]), f"{M} m[1].#kind m m[1]"),
    ("index", lambda v: v["l"].index(10), f"{L} l"),
    ("index missing", lambda v: error_of(lambda: v["l"].index(4)), f"{L} l"),
    ("count", lambda v: v["l"].count(10), f"{L} l"),
    ("less", lambda v: (v["l"] < [40], v["l"] <= [1], v["l"] > [1], v["l"] >= [40]), f"{L} l"),
    ("less reflected", lambda v: [1] < v["l"], f"{L} l"),  # noqa: SIM300
    ("add", lambda v: v["l"] + [1], f"{L} l"),
    ("radd", lambda v: [1] + v["l"], f"{L} l"),
    ("radd twice", lambda v: ([1] + v["l"], [2] + v["l"]), f"{L} l"),
    ("add two views", lambda v: v["l"] + v["m"], f"{L} {M} l m"),
    ("added in place to a list", added_in_place, f"{L} l l.#members l[0] l[1] l[2]"),
    ("extend", lambda v: ([], [].extend(v["l"]))[0], EACH_L),
    ("times", lambda v: v["l"] * 2 + 2 * v["l"], f"{L} l"),
]


@pytest.mark.parametrize(("read", "expected"), [row[1:] for row in READS], ids=[row[0] for row in READS])
def test_reading_records_and_answers_as_plain_data_does(read: Callable[[Any], Any], expected: str) -> None:
    view, recorder = view_of(PLAIN)
    answer = read(view)
    assert seen(recorder) == expected.split()
    plain = copy.deepcopy(PLAIN)
    assert copy.deepcopy(answer) == read(plain)
    for selector, observed in recorder.reads.items():
        assert equal(evaluate(selector, freeze(PLAIN)), observed)


def test_ids_of_the_table_are_unique() -> None:
    assert len({row[0] for row in READS}) == len(READS)


# ---- ways round the view: raised, recorded after all, or blind (an answer that no value can change) -----------------

BYPASSES: list[tuple[str, Callable[[Any, Any], Any], str]] = [
    ("dict.items", lambda v, xs: [x + 1 for _, x in dict.items(v)], "raised"),
    ("dict.values", lambda v, xs: json.dumps(list(dict.values(v))), "raised"),
    ("dict.keys", lambda v, xs: sorted(map(str, dict.keys(v))), "raised"),
    ("dict.__iter__", lambda v, xs: [k.upper() for k in dict.__iter__(v)], "raised"),
    ("dict.pop", lambda v, xs: dict.pop(v, "a"), "raised"),
    ("dict.popitem", lambda v, xs: str(dict.popitem(v)), "raised"),
    ("dict.get", lambda v, xs: dict.get(v, "a"), "blind"),
    ("dict.__contains__", lambda v, xs: dict.__contains__(v, "a"), "blind"),
    ("dict.__len__", lambda v, xs: dict.__len__(v), "blind"),
    ("dict.__eq__", lambda v, xs: dict.__eq__(v, {"a": 1}), "blind"),
    ("list.__getitem__", lambda v, xs: list.__getitem__(xs, 0) + 1, "raised"),
    ("list.__iter__", lambda v, xs: sum(list.__iter__(xs)), "raised"),
    ("list.__contains__", lambda v, xs: list.__contains__(xs, 3), "raised"),
    ("list.index", lambda v, xs: list.index(xs, 3), "raised"),
    ("list.sort", lambda v, xs: list.sort(xs), "raised"),
    ("list.copy", lambda v, xs: str(list.copy(xs)), "raised"),
    ("list.__add__", lambda v, xs: str(list.__add__([], xs)), "raised"),
    ("list.pop", lambda v, xs: f"{list.pop(xs)}", "raised"),
    ("list.__len__", lambda v, xs: list.__len__(xs), "blind"),
    ("list.__eq__", lambda v, xs: list.__eq__(xs, [3]), "blind"),
    ("heapify", lambda v, xs: heapq.heapify(xs), "raised"),
    ("heappush", lambda v, xs: heapq.heappush(xs, 1), "raised"),
    ("heappop", lambda v, xs: heapq.heappop(xs), "raised"),
    ("array.array", lambda v, xs: array.array("i", xs), "raised"),
    ("marshal", lambda v, xs: marshal.dumps(v), "raised"),
    ("marshal list", lambda v, xs: marshal.dumps(xs), "raised"),
    ("pydantic dump_json", lambda v, xs: pydantic.TypeAdapter(Any).dump_json(v), "raised"),
    ("pydantic list[int]", lambda v, xs: pydantic.TypeAdapter(list[int]).validate_python(xs), "raised"),
    ("pydantic list", lambda v, xs: str(pydantic.TypeAdapter(list).validate_python(xs)), "raised"),
    ("object.__getstate__", lambda v, xs: object.__getstate__(v), "blind"),  # type: ignore[attr-defined]
    ("object.__reduce__", lambda v, xs: object.__reduce__(v), "recorded"),
    ("object.__reduce_ex__", lambda v, xs: object.__reduce_ex__(v, 2), "recorded"),
    ("copyreg", lambda v, xs: copyreg._reduce_ex(v, 0), "recorded"),  # type: ignore[attr-defined]
    ("pandas frame", lambda v, xs: pd.DataFrame({"c": xs})["c"].tolist(), "recorded"),
    ("vars", lambda v, xs: vars(v), "raised"),
    ("__dict__", lambda v, xs: v.__dict__, "raised"),
    ("setattr", lambda v, xs: setattr(v, "zz", 1), "raised"),
    ("__class__ =", lambda v, xs: setattr(v, "__class__", dict), "raised"),
    ("hash", lambda v, xs: hash(v), "raised"),
    ("hash list", lambda v, xs: {xs}, "raised"),
    ("keys().mapping", lambda v, xs: v.keys().mapping["a"] + 1, "raised"),
    ("getsizeof", lambda v, xs: sys.getsizeof(v) + sys.getsizeof(xs), "blind"),
    ("__sizeof__", lambda v, xs: v.__sizeof__(), "blind"),
    ("__mro__", lambda v, xs: [each.__name__ for each in type(v).__mro__], "blind"),
    ("base class init", lambda v, xs: dict.__init__(v, z=1), "blind"),
]


def outcome(act: Callable[[Any, Any], Any], plain: Any) -> tuple[str, str]:
    view, recorder = view_of(plain)
    items = view["l"]
    before = len(recorder.reads)
    try:
        answer = f"{act(view, items)!r}"
    except Exception as error:
        return "raised", type(error).__name__
    return "recorded" if len(recorder.reads) > before else "blind", answer


@pytest.mark.parametrize(("act", "expected"), [row[1:] for row in BYPASSES], ids=[row[0] for row in BYPASSES])
def test_a_way_round_the_view_raises_or_says_nothing_of_the_value(act: Callable[..., Any], expected: str) -> None:
    one, other = outcome(act, {"a": 1, "l": [3, 1, 2]}), outcome(act, {"a": 9, "c": 5, "l": [0] * 40})
    assert one[0] == other[0] == expected
    assert expected == "recorded" or one == other


@pytest.mark.parametrize("module", ["orjson", "ormsgpack", "msgspec.json", "ujson", "simplejson"])
def test_encoders_in_c_raise_or_record(module: str) -> None:
    dumps = getattr(pytest.importorskip(module), "packb" if module == "ormsgpack" else "dumps", None)
    dumps = dumps or getattr(pytest.importorskip(module), "encode")  # noqa: B009
    for part in ("b", "l"):
        view, recorder = view_of(PLAIN)
        try:
            dumps(view[part])
        except Exception:
            continue
        leaf = Selector("r", ("b", "x") if part == "b" else ("l", 2))
        assert leaf in recorder.reads or Selector("r", (part,)) in recorder.reads


@pytest.mark.parametrize("base", [dict, list])
def test_every_unbound_method_of_the_base_is_recorded_or_blind_or_raises(base: type) -> None:
    """Found by enumeration, so that a method of a later Python is caught too."""
    arguments: list[tuple[Any, ...]] = [
        (),
        ("a",),
        (0,),
        (1,),
        ({},),
        ([],),
        ([3],),
        ({"a": 1},),
        ("a", 0),
        (slice(0, 1),),
    ]
    ignored = {"__getattribute__", "__class__", "__doc__", "__new__", "__hash__"}
    for name in sorted(set(dir(base)) - ignored):
        for given_ in arguments:

            def act(v: Any, items: Any, name: str = name, given_: tuple[Any, ...] = given_) -> Any:
                answer = getattr(base, name)(v if base is dict else items, *copy.deepcopy(given_))
                return list(answer) if hasattr(answer, "__next__") else answer

            one, other = outcome(act, {"a": 1, "l": [3, 1, 2]}), outcome(act, {"a": 9, "c": 5, "l": []})
            assert "recorded" in (one[0], other[0]) or one == other, (name, given_, one, other)


def test_a_list_is_never_cut_off_by_a_reader_that_mixes_storage_and_view() -> None:
    for size in (0, 1, 63, 64, 65, 127, 128, 500):
        view, _ = view_of([0] * size)
        assert list.__len__(view) > size
        with pytest.raises(IndexError):
            array.array("i", view)


@pytest.mark.parametrize(("view_type", "base"), [(DictView, dict), (ArrView, list)])
def test_every_method_of_the_base_is_written_on_top_of_the_primitives(view_type: type, base: type) -> None:
    harmless = {
        "__class__", "__class_getitem__", "__delattr__", "__dir__", "__doc__", "__format__", "__getattribute__", "__hash__",
        "__setattr__", "__sizeof__", "__str__", "__subclasshook__", "fromkeys",
    }  # fmt: skip
    if base is dict:
        harmless |= {"__lt__", "__le__", "__gt__", "__ge__"}  # NotImplemented whatever the dict
    inherited = {name for name in dir(base) if getattr(view_type, name) == getattr(base, name)}
    assert inherited <= harmless | {"__init_subclass__"}


def test_the_sentinel_raises_whatever_is_done_to_it() -> None:
    for act in (str, repr, bool, hash, len, iter, int, float, operator.index, copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UntrackableRead, match="deepcopy"):
            act(UNREAD)  # type: ignore[operator]
    for binary in (operator.eq, operator.ne, operator.lt, operator.add, operator.getitem, operator.contains, getattr):
        with pytest.raises(UntrackableRead):
            binary(UNREAD, "a")
    for reflected in (operator.eq, operator.lt, operator.add, operator.mul):
        with pytest.raises(UntrackableRead):
            reflected(1, UNREAD)


# ---- writes -----------------------------------------------------------------------------------------------------------

WRITES: list[tuple[str, Callable[[Any], Any]]] = [
    ("d[k] = x", lambda v: operator.setitem(v, "a", 2)),
    ("del d[k]", lambda v: operator.delitem(v, "a")),
    ("update", lambda v: v.update(a=2)),
    ("setdefault", lambda v: v.setdefault("new", 1)),
    ("setdefault present", lambda v: v.setdefault("a", 1)),
    ("pop", lambda v: v.pop("a")),
    ("pop default", lambda v: v.pop("no", 0)),
    ("popitem", lambda v: v.popitem()),
    ("clear", lambda v: v.clear()),
    ("|=", lambda v: operator.ior(v, {"a": 2})),
    ("__init__", lambda v: v.__init__({"a": 2})),
    ("nested", lambda v: operator.setitem(v["b"], "x", 9)),
    ("l[i] = x", lambda v: operator.setitem(v["l"], 0, 2)),
    ("l[i:j] = x", lambda v: operator.setitem(v["l"], slice(0, 1), [2])),
    ("del l[i]", lambda v: operator.delitem(v["l"], 0)),
    ("append", lambda v: v["l"].append("LEAK")),
    ("extend", lambda v: v["l"].extend([1])),
    ("insert", lambda v: v["l"].insert(0, 1)),
    ("list.pop", lambda v: v["l"].pop()),
    ("remove", lambda v: v["l"].remove(10)),
    ("list.clear", lambda v: v["l"].clear()),
    ("sort", lambda v: v["l"].sort()),
    ("reverse", lambda v: v["l"].reverse()),
    ("+=", lambda v: operator.iadd(v["l"], [1])),
    ("*=", lambda v: operator.imul(v["l"], 2)),
]


@pytest.mark.parametrize("write", [row[1] for row in WRITES], ids=[row[0] for row in WRITES])
def test_writing_raises_and_changes_nothing(write: Callable[[Any], Any]) -> None:
    root = freeze(PLAIN)
    state = StateView(Recorder(), lambda name: root, inputs=["r"])
    with pytest.raises(ReadOnlyState, match="read-only in a node"):
        write(state["r"])
    assert copy.deepcopy(state["r"]) == PLAIN == thaw(root)


def test_an_unbound_write_reaches_nobody() -> None:
    view, _ = view_of(PLAIN)
    dict.__setitem__(view, "a", 99)
    list.append(view["l"], "LEAK")
    dict.clear(view["b"])
    assert (view["a"], view["l"][:], dict(view["b"])) == (1, [30, 10, 20], {"x": 2, "y": []})


@pytest.mark.parametrize("write", ["pop", "update", "clear"])
def test_the_state_itself_is_read_only(write: str) -> None:
    state, _ = state_of({"request": freeze(PLAIN)}, inputs=["request"])
    with pytest.raises(ReadOnlyState, match="the state is read-only"):
        getattr(state, write)()


def test_copies_are_plain_and_mutable_and_do_not_share() -> None:
    view, _ = view_of(PLAIN)
    for duplicate in (copy.copy(view), copy.deepcopy(view), view.copy(), view | {}, pickle.loads(pickle.dumps(view))):
        assert type(duplicate) is dict
        duplicate["b"]["y"].append(1)
        duplicate["l"].sort()
        assert view["b"] == PLAIN["b"]
        assert view["l"] == PLAIN["l"]
    first = [] + view["m"]
    first[0]["n"] = "changed"
    assert ([] + view["m"]) == PLAIN["m"]


def test_views_are_real_dicts_and_lists() -> None:
    view, _ = view_of(PLAIN)
    assert isinstance(view, dict)
    assert isinstance(view, Mapping)
    assert isinstance(view["l"], list)
    assert isinstance(view["z"], ObjView)
    assert type(view)() == {}
    assert type(type(view)(a=1)) is dict
    with pytest.raises(TypeError):
        hash(view)
    with pytest.raises(TypeError):
        view[[]]
    assert view["b"] is view["b"]
    assert view["l"] is view.get("l")


# ---- the recorder -------------------------------------------------------------------------------------------------------


def state_of(artifacts: dict[str, Value], **names: Any) -> tuple[Any, Recorder]:
    recorder = Recorder()
    return StateView(recorder, artifacts.__getitem__, **names), recorder


def texts(recorder: Recorder) -> list[str]:
    return [f"{selector}{'!' if selector.role is Role.CONTROL else ''}" for selector in recorder.reads]


def test_first_observation_wins_and_order_is_that_of_first_reads() -> None:
    recorder = Recorder()
    assert recorder.record("r", ("a",), Marker.VALUE, 1)
    assert recorder.record("r", ("b",), Marker.VALUE, 2)
    assert recorder.record("r", ("a",), Marker.VALUE, 3)
    assert list(recorder.reads.values()) == [1, 2]


def test_freezing_a_view_reads_it_whole_and_returns_the_frozen_value() -> None:
    root = freeze(PLAIN)
    state, recorder = state_of({"r": root}, inputs=["r"])
    assert freeze(state["r"]) is root
    assert texts(recorder) == ["r.#kind", "r"]
    nested = freeze({"out": state["r"]["b"], "more": [state["r"]["l"]]})
    assert nested["out"] is root["b"]
    assert texts(recorder)[2:] == ["r.b.#kind", "r.l.#kind", "r.l", "r.b"]


def test_a_control_block_relabels_only_its_own_reads() -> None:
    state, recorder = state_of({"r": freeze(PLAIN)}, inputs=["r"])
    with recorder.control():
        assert state["r"]["a"] == 1
        assert state["r"]["a"] == 1
    assert texts(recorder) == ["r.#kind!", "r.a!"]
    assert state["r"]["a"] == 1  # read as control, now read as data: both count
    assert texts(recorder)[2:] == ["r.#kind", "r.a"]
    with recorder.control():
        repr(state["r"])
    assert texts(recorder)[4:] == ["r!"]


def test_control_does_not_leak_to_other_recorders_threads_and_tasks() -> None:
    state, recorder = state_of({"r": freeze(PLAIN)}, inputs=["r"])
    other, elsewhere = state_of({"r": freeze(PLAIN)}, inputs=["r"])
    with recorder.control():
        assert other["r"]["a"] == 1
        in_thread(state["r"])
    assert set(texts(elsewhere)) == {"r.#kind", "r.a"}
    assert texts(recorder) == ["r.#kind!", "r.b.#kind", "r.b.x"]

    async def controlled(entered: asyncio.Event, left: asyncio.Event) -> None:
        with recorder.control():
            entered.set()
            await left.wait()

    async def both() -> None:
        entered, left = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(controlled(entered, left))
        await entered.wait()
        assert recorder.role is Role.DATA
        left.set()
        await task

    asyncio.run(both())


def test_in_place_addition_inside_a_control_block_is_a_data_read() -> None:
    state, recorder = state_of({"r": freeze([1, 2])}, inputs=["r"])
    with recorder.control():
        assert [0] + state["r"] == [0, 1, 2]
    assert texts(recorder) == ["r.#kind!", "r"]


def test_a_view_outlives_its_attempt_and_keeps_its_recorder() -> None:
    artifacts = {"r": freeze(PLAIN)}
    old_state, old = state_of(artifacts, inputs=["r"])
    captured = old_state["r"]  # C25: a module-level global captured before
    new_state, new = state_of(artifacts, inputs=["r"])
    assert captured["a"] == new_state["r"]["a"]
    assert captured["t"] == "hi"
    assert (texts(old), texts(new)) == (["r.#kind", "r.a", "r.t"], ["r.#kind", "r.a"])


def test_degrading_records_everything_visible_as_data() -> None:
    artifacts = {"r": freeze(PLAIN), "p": ABSENT, "w[k]": freeze([1]), "s": freeze({"who": {"k": 0}})}
    state, recorder = state_of(artifacts, inputs=["r"], parents=["p"], groups={"w": Group("s", ("who",), ("k",))})
    assert recorder.coverage is Coverage.COMPLETE
    assert state["r"]["a"] == 1
    with recorder.control():
        recorder.degrade("a C extension")
    assert (recorder.coverage, recorder.degraded) == (Coverage.UNKNOWN, ["a C extension"])
    assert texts(recorder) == ["r.#kind", "r.a", "r", "p", "s.who.#members!", "w[k]"]
    assert recorder.reads[Selector("p", ())] is ABSENT


def test_a_recorder_degraded_before_it_is_attached_reads_everything_when_it_is() -> None:
    recorder = Recorder()
    recorder.degrade("unknown from the start")
    StateView(recorder, {"r": 1, "q": 2}.__getitem__, inputs=["r", "q"])
    assert texts(recorder) == ["r", "q"]


def test_degrading_after_a_move_must_not_let_the_attempt_commit() -> None:
    _, recorder = state_of({"r": 1}, inputs=["r"])
    recorder.epoch += 1
    with pytest.raises(UntrackableRead, match="must not commit"):
        recorder.degrade("seen too late")
    assert recorder.coverage is Coverage.UNKNOWN


def test_a_read_can_be_stopped_before_it_is_recorded() -> None:
    def stop(selector: Selector, observed: Value) -> None:
        if selector.path == ("a",):
            raise RuntimeError(f"stopped at {observed}")

    recorder = Recorder(on_read=stop)
    state = StateView(recorder, lambda name: freeze(PLAIN), inputs=["r"])
    with pytest.raises(RuntimeError, match="stopped at 1"):
        state["r"]["a"]
    assert texts(recorder) == ["r.#kind"]


@pytest.mark.parametrize(
    ("late", "answer"),
    [
        (lambda v: v["a"], 2),
        (lambda v: v["a2"], "new"),
        (lambda v: v.get("gone"), None),
        (lambda v: "gone" in v, False),
        (lambda v: list(v), ["a", "a2", "kind", "l", "same"]),
        (lambda v: len(v), 5),
        (lambda v: v["kind"], {"now": 1}),
        (lambda v: v["l"][1:9], [0]),
        (lambda v: len(v["l"]), 2),
        (lambda v: copy.copy(v)["a"], 2),
    ],
)
def test_a_late_read_is_of_the_cut_that_the_driver_moves_to(late: Callable[[Any], Any], answer: Any) -> None:
    old = freeze({"a": 1, "gone": 0, "kind": 0, "l": [0, 0, 0], "same": 5})
    new = freeze({"a": 2, "a2": "new", "kind": {"now": 1}, "l": [0, 0], "same": 5})
    roots = [old]

    def move(selector: Selector, observed: Value) -> None:
        if "same" in [step for read in recorder.reads for step in read.path] and roots[0] is old:
            roots[0] = new
            recorder.epoch += 1

    recorder = Recorder(on_read=move)
    state = StateView(recorder, lambda name: roots[0], inputs=["r"])
    view = state["r"]
    assert view["same"] == 5
    assert copy.deepcopy(late(view)) == answer
    assert all(equal(evaluate(selector, new), observed) for selector, observed in recorder.reads.items())


# ---- the state ------------------------------------------------------------------------------------------------------------


def test_inputs_and_parents_by_name() -> None:
    state, recorder = state_of({"budget": 3, "plan": freeze({"legs": []})}, inputs=["budget"], parents=["plan"])
    assert state["budget"] == 3
    assert state["plan"]["legs"] == []
    assert texts(recorder) == ["budget", "plan.#kind", "plan.legs.#kind", "plan.legs"]


def test_a_skipped_parent_is_an_absent_read() -> None:
    state, recorder = state_of({"fly": ABSENT, "ride": 1}, parents=["fly", "ride"])
    with pytest.raises(KeyError, match="'fly' was skipped"):
        state["fly"]
    assert recorder.reads == {Selector("fly", (), Marker.HAS): False}
    assert state.get("fly", "none") == "none"
    assert ("fly" in state, "ride" in state) == (False, True)
    assert (list(state), len(state)) == (["ride"], 1)
    assert texts(recorder) == ["fly.#has", "ride.#has"]
    assert dict(state) == {"ride": 1}
    assert json.loads(json.dumps(state)) == {"ride": 1}
    assert freeze(state) == {"ride": 1}
    assert recorder.reads[Selector("fly", ())] is ABSENT


@pytest.mark.parametrize("touch", [operator.getitem, lambda s, k: s.get(k), lambda s, k: k in s])
def test_a_hidden_node_is_refused_with_the_remedy(touch: Callable[[Any, str], Any]) -> None:
    state, recorder = state_of({"r": 1}, inputs=["r"], hidden=["other"])
    with pytest.raises(UndeclaredRead, match='after="other"') as caught:
        touch(state, "other")
    assert caught.value.name == "other"
    assert not recorder.reads


def test_an_unknown_name_gives_the_nearest_ones_and_is_no_read() -> None:
    state, recorder = state_of({}, inputs=["request"], parents=["plan"])
    with pytest.raises(KeyError, match="it has request"):
        state["requets"]
    with pytest.raises(KeyError, match="it has request, plan"):
        state["zzz"]
    assert (state.get("zzz", 5), "zzz" in state, state.get(4)) == (5, False, None)
    assert not recorder.reads


SPAWNED: dict[str, Value] = {"plan": freeze({"jobs": {"a": {}, "b": {}}}), "w[a]": freeze({"n": 1}), "w[b]": 2}


@pytest.mark.parametrize(
    ("read", "answer", "expected"),
    [
        (lambda g: list(g), ["a", "b"], ["plan.jobs.#members!"]),
        (lambda g: len(g), 2, ["plan.jobs.#members!"]),
        (lambda g: sorted(g.keys()), ["a", "b"], ["plan.jobs.#members!"]),
        (lambda g: bool(g), True, ["plan.jobs.#members!"]),
        (lambda g: "a" in g, True, ["plan.jobs.#has:a!"]),
        (lambda g: "c" in g, False, ["plan.jobs.#has:c!"]),
        (lambda g: g.get("c", 0), 0, ["plan.jobs.#has:c!"]),
        (lambda g: g["a"]["n"], 1, ["w[a].#kind", "w[a].n"]),
        (lambda g: g["b"], 2, ["w[b]"]),
        (lambda g: dict(g), {"a": {"n": 1}, "b": 2}, ["plan.jobs.#members!", "w[a].#kind", "w[b]", "w[a]"]),
        (lambda g: copy.deepcopy(g), {"a": {"n": 1}, "b": 2}, ["plan.jobs.#members!", "w[a]", "w[b]"]),
    ],
)
def test_a_group_reads_its_membership_as_control(read: Callable[[Any], Any], answer: Any, expected: list[str]) -> None:
    state, recorder = state_of(SPAWNED, groups={"w": Group("plan", ("jobs",), ("a", "b"))})
    assert copy.deepcopy(read(state["w"])) == answer
    assert texts(recorder) == expected
    for selector, observed in recorder.reads.items():
        assert equal(evaluate(selector, SPAWNED[selector.artifact]), observed)


def test_members_of_a_list_are_known_by_its_contents() -> None:
    artifacts = {"plan": freeze({"jobs": [{"q": 1}]}), "w[x]": 1}
    state, recorder = state_of(artifacts, groups={"w": Group("plan", ("jobs",), ("x",))})
    assert ("x" in state["w"], list(state["w"])) == (True, ["x"])
    assert texts(recorder) == ["plan.jobs!"]


def test_a_missing_member_says_who_spawned_and_a_group_is_read_only() -> None:
    state, _ = state_of({**SPAWNED, "w[b]": ABSENT}, groups={"w": Group("plan", ("jobs",), ("a", "b"))})
    with pytest.raises(KeyError, match="no member 'z' - 'plan' spawned"):
        state["w"]["z"]
    with pytest.raises(KeyError, match="was skipped"):
        state["w"]["b"]
    with pytest.raises(ReadOnlyState):
        state["w"]["a"] = 1
    assert thaw(freeze(state)) == {"w": {"a": {"n": 1}}}


def test_thawed_gives_plain_copies_and_reads_everything_at_once() -> None:
    artifacts = {"r": freeze(PLAIN), "gone": ABSENT, **SPAWNED}
    recorder = Recorder()
    state = thawed(artifacts.__getitem__, ["r", "gone", "w[a]", "w[b]"], groups=["w", "none"], recorder=recorder)
    assert state == {"r": PLAIN, "w": {"a": {"n": 1}, "b": 2}, "none": {}}
    assert texts(recorder) == ["r", "gone", "w[a]", "w[b]"]
    assert recorder.coverage is Coverage.UNKNOWN
    state["r"]["l"].append(1)
    assert thaw(artifacts["r"]) == PLAIN
    assert thawed(artifacts.__getitem__, ["r"]) == {"r": PLAIN}


# ---- from the case list: what must and what must not invalidate a reader ----------------------------------------------


def invalidated(read: Callable[[Any], Any], plain: Any, revised: Any) -> bool:
    view, recorder = view_of(plain)
    with suppress(LookupError):
        read(view)
    old, new = freeze(plain), freeze(revised)
    delta = delta_between("r", 1, old, new)
    met = any(meets(delta, selector) is not None for selector in recorder.reads)
    moved = any(not equal(evaluate(selector, new), observed) for selector, observed in recorder.reads.items())
    assert met or not moved
    return met


@pytest.mark.parametrize("order", list(itertools.permutations("xyz")))
@pytest.mark.parametrize("changed", "xyz")
def test_order_of_reads_hides_no_change(order: tuple[str, ...], changed: str) -> None:  # C27
    plain = {"x": 1, "y": 2, "z": 3}
    assert invalidated(lambda v: [v[key] for key in order], plain, {**plain, changed: 0})


@pytest.mark.parametrize("read", [lambda v: "coupon" in v, lambda v: v.get("coupon"), lambda v: v["coupon"]])
def test_absence_is_a_read_of_that_key_only(read: Callable[[Any], Any]) -> None:  # C17
    assert invalidated(read, {"n": 1}, {"n": 1, "coupon": 5})
    assert invalidated(read, {"n": 1}, {"n": 1, "coupon": {}})
    assert not invalidated(read, {"n": 1}, {"n": 1, "other": 5})
    assert not invalidated(read, {"n": 1}, {"n": 2})


@pytest.mark.parametrize("read", [lambda v: len(v["t"]), lambda v: v["t"].keys(), lambda v: list(v["t"]), bool])
def test_keys_are_not_values(read: Callable[[Any], Any]) -> None:  # C18
    plain = {"t": {"a": 1, "b": 2}}
    assert not invalidated(read, plain, {"t": {"a": 1, "b": 9}})
    if read is not bool:
        assert invalidated(read, plain, {"t": {"a": 1, "b": 2, "c": 3}})
        assert invalidated(read, plain, {"t": {"a": 1}})


def test_deletion_reaches_readers_of_the_key_and_of_the_key_set() -> None:  # C30
    plain = {"filter": {"k": 1}, "n": 1}
    for read in (lambda v: v["filter"]["k"], lambda v: list(v), lambda v: len(v["filter"]), lambda v: "filter" in v):
        assert invalidated(read, plain, {"n": 1})
    assert not invalidated(lambda v: v["n"], plain, {"n": 1})


def test_a_callable_cannot_hide_in_the_state() -> None:  # C28
    with pytest.raises(ValueNotCanonical, match="not JSON-like"):
        freeze({"scorer": len})


# ---- properties -----------------------------------------------------------------------------------------------------------

LEAVES: list[Any] = [None, True, 0, 1, 1.0, "a", "b"]
VALUES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=8,
)
ROOTS = st.dictionaries(st.sampled_from("abc"), VALUES, min_size=1, max_size=3)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["down", "down", "down", "up", "get", "in", "len", "iter", "first", "items", "slice", "whole", "find", "eq"]
        ),
        st.sampled_from("abcd"),
        st.integers(-2, 3),
        st.integers(0, 3),
    ),
    max_size=12,
)


def shallow(found: Any) -> Any:
    """Return a leaf, or the kind of a container."""
    return "object" if isinstance(found, dict) else "array" if isinstance(found, list) else found


def step_through(at: Any, step: tuple[str, str, int, int]) -> tuple[Any, Any]:
    """Read something off a container; return what was learnt and where a walk leads."""
    act, name, low, high = step
    key: Any = name if isinstance(at, dict) else low
    if act == "down":
        try:
            inner = at[key]
        except LookupError:
            return "nothing there", at
        return shallow(inner), inner if isinstance(inner, dict | list) else at
    if act == "in" and isinstance(at, dict):
        return name in at, at
    if act == "get" and isinstance(at, dict):
        return shallow(at.get(name, "default")), at
    if act in ("in", "find"):
        return (high in at if isinstance(at, list) else [k for k, x in at.items() if x == name]), at
    if act in ("get", "slice") and isinstance(at, list):
        cut = slice(low, None if high == 3 else high - 1, -1 if name == "d" else None)
        return [shallow(x) for x in at[cut]], at
    if act == "len":
        return (len(at), bool(at)), at
    if act == "first":
        return [shallow(x) for x in itertools.islice(reversed(at) if name == "d" else at, high)], at
    if act == "items" and isinstance(at, dict):
        return [(k, shallow(x)) for k, x in itertools.islice(at.items(), high)], at
    if act == "whole":
        return canonical_text(freeze(at if name == "a" else json.loads(json.dumps(at)))), at
    if act == "eq":
        return (at == {"a": 1}, at != [low]), at
    return [shallow(x) for x in at], at


def run_program(start: Any, program: list[tuple[str, str, int, int]], between: Callable[[int], None]) -> list[Any]:
    """Run a program of reads; what it does next depends only on what it has read."""
    at, learnt = start, []
    for count, step in enumerate(program):
        between(count)
        if step[0] == "up":
            at = start
            continue
        found, at = step_through(at, step)
        learnt.append(repr(found))
    return learnt


def still(count: int) -> None:
    """Leave the snapshot where it is."""


def edits(plain: Any) -> list[Any]:
    """Return every value that differs from ``plain`` in one place."""
    found: list[Any] = [x for x in (7, {}, [], {"a": 1}, [0]) if not equal(freeze(x), freeze(plain))]
    if isinstance(plain, dict):
        found += [{**plain, key: x} for key in "abcd" if key not in plain for x in (7, {})]
        found += [{k: x for k, x in plain.items() if k != key} for key in plain]
        found += [{**plain, key: x} for key in plain for x in edits(plain[key])]
    if isinstance(plain, list):
        found += [[*plain, x] for x in (7, {}, [])] + [[7, *plain]]
        found += [plain[:i] + plain[i + 1 :] for i in range(len(plain))]
        found += [[*plain[:i], x, *plain[i + 1 :]] for i in range(len(plain)) for x in edits(plain[i])]
    return found


def check_soundness(
    plain: Any, program: list[tuple[str, str, int, int]], more: list[Any], recorder: Recorder
) -> tuple[int, int]:
    """Check that what no read meets changes nothing; return how many changes were met and not."""
    root = freeze(plain)
    view, _ = view_of(plain, recorder)
    learnt = run_program(view, program, still)
    assert learnt == run_program(copy.deepcopy(thaw(root)), program, still), "a view answers as plain data does"
    for selector, observed in recorder.reads.items():
        assert equal(evaluate(selector, root), observed), selector
    counts = [0, 0]
    for revised in [*(x for x in edits(plain) if isinstance(x, dict)), *more]:
        new = freeze(revised)
        delta = delta_between("r", 1, root, new)
        met = any(meets(delta, selector) is not None for selector in recorder.reads)
        counts[met] += 1
        if not met:
            assert all(equal(evaluate(selector, new), seen_) for selector, seen_ in recorder.reads.items())
            assert run_program(view_of(revised)[0], program, still) == learnt, (plain, revised, texts(recorder))
    return counts[0], counts[1]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(plain=ROOTS, program=STEPS, more=st.lists(ROOTS, max_size=3))
@example(plain={"a": [1, {"b": 2}], "c": {}}, program=[("down", "a", 0, 0), ("slice", "a", 0, 2)], more=[])
def test_what_no_read_meets_changes_nothing(plain: Any, program: Any, more: list[Any]) -> None:
    check_soundness(plain, program, more, Recorder())


class Forgetful(Recorder):
    """The mutant of theorem T3: one kind of read is dropped."""

    def __init__(self, dropped: Marker) -> None:
        super().__init__()
        self.dropped = dropped

    def record(self, artifact: str, path: Path, marker: Marker, observed: Value, role: Role | None = None) -> bool:
        return marker is self.dropped or super().record(artifact, path, marker, observed, role)


@pytest.mark.parametrize("dropped", list(Marker))
def test_the_soundness_check_sees_both_outcomes_and_fails_when_reads_are_dropped(dropped: Marker) -> None:
    plain = {"a": {"b": 1, "c": [1]}, "b": [1, 2]}
    acts = ["down", "down", "up", "down", "down", "len", "up", "in", "down"]
    program = [(act, "abbacbbdb"[i], 0, 0) for i, act in enumerate(acts)]
    assert min(check_soundness(plain, program, [], Recorder())) > 5
    with pytest.raises(AssertionError):
        check_soundness(plain, program, [], Forgetful(dropped))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(plain=ROOTS, revised=ROOTS, program=STEPS, after=st.integers(0, 8), inside=st.booleans(), share=st.booleans())
def test_an_extended_attempt_ends_as_one_started_on_the_new_cut(
    plain: Any, revised: Any, program: Any, after: int, inside: bool, share: bool
) -> None:
    """Prefix equivalence (rule R4): the snapshot may move whenever all reads so far evaluate equal on the new cut."""
    if share:
        revised = {**plain, **{key: revised[key] for key in list(revised)[:1]}}
    roots, target = [freeze(plain)], freeze(revised)

    def move(*unused: object) -> None:
        reads = recorder.reads.items()
        if roots[0] is not target and len(reads) >= after and all(equal(evaluate(s, target), x) for s, x in reads):
            roots[0] = target
            recorder.epoch += 1

    recorder = Recorder(on_read=move if inside else None)
    view = StateView(recorder, lambda name: roots[0], inputs=["r"])["r"]
    learnt = run_program(view, program, still if inside else move)
    final, fresh = view_of(thaw(roots[0]))
    assert learnt == run_program(final, program, still)
    assert all(equal(evaluate(selector, roots[0]), observed) for selector, observed in recorder.reads.items())
    assert set(fresh.reads) <= set(recorder.reads)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plain=VALUES)
def test_a_view_survives_json_and_copies_like_plain_data(plain: Any) -> None:
    expected = thaw(freeze({"v": plain}))
    view, recorder = view_of({"v": plain})
    assert json.loads(json.dumps(view)) == expected
    assert repr(view) == repr(expected)
    assert copy.deepcopy(view) == expected == view
    assert type(freeze(view)) is Obj
    assert isinstance(Arr(recorder.reads), tuple)
