"""The machine, driven event by event: every history says what must be decided after every move, and nothing else may be.

The counterexamples of the protocol's rules are here by their shortest histories: each shows an interleaving that a
machine without the rule gets wrong.
"""

from __future__ import annotations

import re

import pytest

from revise_lab.core.machine import Machine, replay
from revise_lab.core.table import ATTEMPTS
from revise_lab.errors import IllegalEvent, ReviseLabError
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.attempt import Coverage
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Read
from revise_lab.records.value import freeze

DELTA = {}
DIGEST = {"check": "digest"}
DIFF = {"check": "digest", "propagation": "diff"}
LOCAL = {"unknown": "local"}
EXTEND = {"check": "digest", "propagation": "diff", "extension": "on"}
SUFFIX = {"policy": "suffix"}
RESTART = {"policy": "restart"}
WAIT = {"policy": "wait"}

CHAIN = "G; P < G; X < P"
ROUTED = "R; a < R ? R.left; b < R ? R.right; j < a b"
SPAWNED = "S; m * S.tasks; j < m"
INPUTS = {"in": {"f": 0, "g": 0, "h": 0}}

G1 = "start G; read G in.f; finish G; [commit G@1]"
P1 = "start P; read P G.o; finish P; [commit P@1]"
X1 = "start X; read X P.o; finish X; [commit X@1]"
LEFT, RIGHT = '{"lane": {"left": true}}', '{"lane": {"right": true}}'
R_LEFT = f"start R; read R in.f!; finish R {LEFT}; [commit R@1]"
A1 = "start a; read a in.g; finish a; [commit a@1]"
J_AB = "read j a.#has a.o b.#has"
SPAWN = 'start S; read S in.f; finish S {"tasks": {"a": 1, "b": 2}}; [commit S@1]'
MEMBERS = (
    "start m[a]; read m[a] S.tasks.a; finish m[a]; [commit m[a]@1];"
    "start m[b]; read m[b] S.tasks.b; finish m[b]; [commit m[b]@1]"
)
JOIN = "start j; read j S.tasks.#members! m[a].o m[b].o; finish j; [commit j@1]"

HISTORIES = {
    # --- gates ---
    "row 1: a child of a doubtful parent cannot start, however clean that parent looks": (
        CHAIN, DIFF,
        f"{G1}; {P1}; rev in.f=1; [subgraph G]; ~start X; ~start P; start G; ~start X; read G in.f; finish G;"
        f"[commit G@2];"
        "~start X; start P; read P G.o; finish P; [commit P@2]; start X; read X P.o; finish X; [commit X@1];"
        "close; [closed]",
        {"G": 2, "P": 2, "X": 1},
    ),
    "row 2: nor can the child of a dirty node": (
        CHAIN, DIGEST, f"{G1}; rev in.f=1; [subgraph G P X]; ~start P; start G; ~start P", {"G": 2, "P": 0, "X": 0},
    ),
    "row 3: an invalidated parent is not current until it is replaced": (
        CHAIN, DELTA,
        "rev in.f=1; [subgraph]; start G; read G in.f; finish G; [commit G@1]; rev in.f=2; [subgraph G P X];"
        "~start P; start G;"
        "read G in.f; ~start P; finish G; [commit G@2]; start P; read P G.o; finish P; [commit P@1]",
        {"G": 2, "P": 1, "X": 0},
    ),
    "row 4: no child sees an old parent beside a new input": (
        "P; X < P", DIFF,
        "start P; read P in.f; finish P; [commit P@1]; rev in.f=1; [subgraph P]; rev in.g=1; [subgraph]; ~start X;"
        "start P; read P in.f; finish P; [commit P@2]; start X; read X P.o in.g; finish X; [commit X@1]",
        {"P": 2, "X": 1},
    ),
    "row 7: an output commit has a version of its own, so a late read of the parent is seen": (
        "A; C < A", DIFF,
        "start A; read A in.f; finish A; [commit A@1]; start C; rev in.f=1; [subgraph A]; start A; read A in.f;"
        "finish A;"
        "[commit A@2]; read C A.o; [stop C@1]; stopped C; start C; read C A.o; finish C; [commit C@2]; close;"
        "[closed]",
        {"A": 2, "C": 2},
    ),
    "row 8: an attempt of a dead branch stops, and never commits": (
        ROUTED, DIFF,
        f"{R_LEFT}; start a; read a in.g; rev in.f=1; [subgraph R]; start R; read R in.f!; finish R {RIGHT};"
        "[commit R@2, stop a@1]; finish a; [discard a@1]; ~start a; start b; read b in.g; finish b; [commit b@1];"
        "start j; read j a.#has b.o; finish j; [commit j@1]; close; [closed]",
        {"R": 2, "a": 1, "b": 1, "j": 1},
    ),
    "row 17: nobody reads an output that waits for its parent": (
        CHAIN, DIFF,
        f"{G1}; start P; read P G.o; rev in.f=1; [subgraph G]; finish P; []; ~start X; start G; read G in.f;"
        'finish G {"o": [0]}; [commit G@2, commit P@1]; start X; read X P.o; finish X; [commit X@1]; close; [closed]',
        {"G": 2, "P": 1, "X": 1},
    ),
    "a waiting attempt is rejected as soon as a read of it mismatches": (
        CHAIN, DIFF,
        f"{G1}; start P; read P G.o; rev in.f=1; [subgraph G]; finish P; start G; read G in.f; finish G;"
        "[commit G@2, reject P@1]; start P; read P G.o; finish P; [commit P@2]",
        {"G": 2, "P": 2, "X": 0},
    ),
    "a waiting attempt is stopped by the plan that hits it": (
        "G; P < G", DIFF,
        "start G; read G in.f; finish G; [commit G@1]; start P; read P G.o in.g; rev in.f=1; [subgraph G]; finish P;"
        "rev in.g=1; [subgraph P, stop P@1]; ~stopped P; ~finish P",
        {"G": 1, "P": 1},
    ),
    # --- certificates ---
    "a late read of a changed place: rejected at the commit under delta": (
        CHAIN, DELTA,
        "start G; read G in.g; rev in.f=1; [subgraph]; read G in.f; []; finish G; [reject G@1]; start G; read G in.f;"
        "finish G; [commit G@2]",
        {"G": 2, "P": 0, "X": 0},
    ),
    "a late read of a changed place: stopped at once under digest": (
        CHAIN, DIGEST,
        "start G; read G in.g; rev in.f=1; [subgraph]; read G in.f; [stop G@1]; stopped G; start G; read G in.f in.g;"
        "finish G; [commit G@2]",
        {"G": 2, "P": 0, "X": 0},
    ),
    "ABA before a late read: delta rejects what nobody can tell apart": (
        CHAIN, DELTA,
        "start G; rev in.f=1; [subgraph]; rev in.f=0; [subgraph]; read G in.f; finish G; [reject G@1]; start G",
        {"G": 2, "P": 0, "X": 0},
    ),
    "ABA before a late read: digest accepts": (
        CHAIN, DIGEST,
        "start G; rev in.f=1; [subgraph]; rev in.f=0; [subgraph]; read G in.f; finish G; [commit G@1]; start P",
        {"G": 1, "P": 1, "X": 0},
    ),
    "ABA of a finished node: its output holds again, and so does what follows": (
        CHAIN, DIFF,
        f"{G1}; {P1}; {X1}; rev in.f=1; [subgraph G]; ~close; rev in.f=0; [subgraph]; ~start G; close; [closed]",
        {"G": 1, "P": 1, "X": 1},
    ),
    "ABA of a finished node while it runs again: the new attempt is not needed": (
        CHAIN, DIFF,
        f"{G1}; {P1}; rev in.f=1; [subgraph G]; start G; rev in.f=0; [subgraph, stop G@2]; finish G; [discard G@2];"
        "start X; read X P.o; finish X; [commit X@1]; close; [closed]",
        {"G": 2, "P": 1, "X": 1},
    ),
    "ABA of a finished node under delta: everything below runs again": (
        CHAIN, DELTA,
        f"{G1}; {P1}; {X1}; rev in.f=1; [subgraph G P X]; rev in.f=0; [subgraph]; start G; read G in.f; finish G;"
        f"[commit G@2];"
        "start P; read P G.o; finish P; [commit P@2]; start X; read X P.o; finish X; [commit X@2]; close; [closed]",
        {"G": 2, "P": 2, "X": 2},
    ),
    "a write of the same value is no change": (
        CHAIN, DELTA,
        f"{G1}; {P1}; start X; read X P.o; rev in.f=0; [subgraph]; finish X; [commit X@1]; close; [closed]",
        {"G": 1, "P": 1, "X": 1},
    ),
    "an equal output cuts off: what follows keeps its attempt": (
        CHAIN, DIFF,
        f"{G1}; {P1}; {X1}; rev in.f=1; [subgraph G]; start G; read G in.f; finish G {{\"o\": [0]}}; [commit G@2];"
        "~start P; close; [closed]",
        {"G": 2, "P": 1, "X": 1},
    ),
    "an equal output under descendants: what follows runs again all the same": (
        CHAIN, DIGEST,
        f"{G1}; {P1}; rev in.f=1; [subgraph G P X]; start G; read G in.f; finish G {{\"o\": [0]}}; [commit G@2];"
        f"start P",
        {"G": 2, "P": 2, "X": 0},
    ),
    "a disjoint sibling keeps its attempt": (
        "A; B; J < A B", DELTA,
        "start A; read A in.f; start B; read B in.g; rev in.f=1; [subgraph A J, stop A@1]; finish B;"
        "[commit B@1]; stopped A;"
        "start A; read A in.f; finish A; [commit A@2]; start J; read J A.o B.o; finish J; [commit J@1]",
        {"A": 2, "B": 1, "J": 1},
    ),
    "a join pins both parents": (
        "A; B; J < A B", DIFF,
        "start A; read A in.f; finish A; [commit A@1]; start B; read B in.g; finish B; [commit B@1]; start J;"
        "read J A.o;"
        "rev in.g=1; [subgraph B]; finish J; []; start B; read B in.g; finish B; [commit B@2, commit J@1]; close;"
        "[closed]",
        {"A": 1, "B": 2, "J": 1},
    ),
    # --- extension ---
    "a late read moves to the newest snapshot": (
        CHAIN, EXTEND,
        f"{G1}; start P; read P G.o; rev in.g=1; [subgraph]; extend P; [move P@1]; read P in.g; finish P;"
        f"[commit P@1];"
        "start X; read X P.o; finish X; [commit X@1]; close; [closed]",
        {"G": 1, "P": 1, "X": 1},
    ),
    "row 5: no extension while a parent is in doubt; a late read that differs stops": (
        "P; X < P", EXTEND,
        "start P; read P in.f; finish P; [commit P@1]; start X; rev in.f=1; [subgraph P]; rev in.g=1; [subgraph];"
        "read X P.o;"
        "extend X; []; read X in.g; [stop X@1]; start P; read P in.f; finish P; [commit P@2]; stopped X; start X;"
        "read X P.o in.g; finish X; [commit X@2]; close; [closed]",
        {"P": 2, "X": 2},
    ),
    "row 6: an attempt is not moved past a change of what it has read": (
        "P; X < P", EXTEND,
        'start P; read P in.f; finish P {"a": 0, "b": 0}; [commit P@1]; start X; rev in.f=1; [subgraph P];'
        'start P; read P in.f;'
        'read X P.a; finish P {"a": 1, "b": 1}; [commit P@2, stop X@1]; rev in.g=1; [subgraph]; extend X; [];'
        "stopped X; start X; read X P.a P.b; finish X; [commit X@2]; close; [closed]",
        {"P": 2, "X": 2},
    ),
    "an attempt is moved past a change of what it has not read": (
        "P; X < P", EXTEND,
        'start P; read P in.f; finish P {"a": 0, "b": 0}; [commit P@1]; start X; read X P.a; rev in.f=1;'
        '[subgraph P]; start P;'
        'read P in.f; finish P {"a": 0, "b": 1}; [commit P@2]; extend X; [move X@1]; read X P.b; finish X;'
        '[commit X@1]; close;'
        "[closed]",
        {"P": 2, "X": 1},
    ),
    "row 10: an attempt of unknown reads is never moved": (
        "U", {**EXTEND, **LOCAL, "U": {"unknown": ["reads"]}},
        "start U; extend U; []; rev in.g=1; [subgraph U, stop U@1]; extend U; []; stopped U; ~extend U; start U;"
        "finish U; [commit U@2]",
        {"U": 2},
    ),
    "without the switch nothing moves": (
        "G", {"sync": ("G",)},
        "start G; rev in.f=1; [subgraph]; extend G; []; read G in.g; rev in.g=1; [subgraph G, orphan G@1];"
        "extend G; []; finish G;"
        "[discard G@1]; start G; read G in.f in.g; finish G; [commit G@2]",
        {"G": 2},
    ),
    # --- activation ---
    "a flip retracts the finished branch, and the flip back runs it again": (
        ROUTED, DELTA,
        f"{R_LEFT}; {A1}; start j; {J_AB}; finish j; [commit j@1]; rev in.f=1; [subgraph R a j]; start R;"
        f"read R in.f!;"
        f"finish R {RIGHT}; [commit R@2, retract a]; ~start a; start b; read b in.g; finish b; [commit b@1]; start j;"
        f"read j a.#has b.o; finish j; [commit j@2]; rev in.f=0; [subgraph R b j]; start R; read R in.f!;"
        f"finish R {LEFT}; [commit R@3, retract b]; start a; read a in.g; finish a; [commit a@2]; start j; {J_AB};"
        f"finish j;"
        "[commit j@3]; close; [closed]",
        {"R": 3, "a": 2, "b": 1, "j": 3},
    ),
    "a flip under diff": (
        ROUTED, DIFF,
        f"{R_LEFT}; {A1}; start j; {J_AB}; finish j; [commit j@1]; rev in.f=1; [subgraph R]; start R; read R in.f!;"
        f"finish R {RIGHT}; [commit R@2, retract a]; ~start j; start b; read b in.g; finish b; [commit b@1]; start j;"
        "read j a.#has b.o; finish j; [commit j@2]; close; [closed]",
        {"R": 2, "a": 1, "b": 1, "j": 2},
    ),
    "the same decision keeps the branch": (
        ROUTED, DIFF,
        f"{R_LEFT}; {A1}; start j; {J_AB}; finish j; [commit j@1]; rev in.f=1; [subgraph R]; start R; read R in.f!;"
        f"finish R {LEFT}; [commit R@2]; close; [closed]",
        {"R": 2, "a": 1, "b": 0, "j": 1},
    ),
    "row 9: a router's text counts beside its decision": (
        "R; k < R ? R.left", DIFF,
        'start R; read R in.f!; finish R {"lane": {"left": true}, "why": 80}; [commit R@1]; start k;'
        'read k R.why; finish k;'
        '[commit k@1]; rev in.f=1; [subgraph R]; start R; read R in.f!; finish R {"lane": {"left": true}, "why": 90};'
        "[commit R@2]; ~close; start k; read k R.why; finish k; [commit k@2]; close; [closed]",
        {"R": 2, "k": 2},
    ),
    "members come, go and are replaced": (
        SPAWNED, DIFF,
        f"{SPAWN}; {MEMBERS}; {JOIN}; rev in.f=1; [subgraph S]; start S; read S in.f;"
        'finish S {"tasks": {"b": 3, "c": 4}}; [commit S@2, retract m[a]]; ~start m[a]; ~start j;'
        "start m[b]; read m[b] S.tasks.b; finish m[b]; [commit m[b]@2]; start m[c]; read m[c] S.tasks.c; finish m[c];"
        "[commit m[c]@1]; start j; read j S.tasks.#members! m[b].o m[c].o; finish j; [commit j@2]; close; [closed]",
        {"S": 2, "m[b]": 2, "m[c]": 1, "j": 2},
    ),
    "a member added leaves the others alone": (
        SPAWNED, DIFF,
        f"{SPAWN}; {MEMBERS}; {JOIN}; rev in.f=1; [subgraph S]; start S; read S in.f;"
        'finish S {"tasks": {"a": 1, "b": 2, "c": 3}}; [commit S@2]; ~start m[a]; ~start m[b]; start m[c];'
        "read m[c] S.tasks.c; finish m[c]; [commit m[c]@1]; start j;"
        "read j S.tasks.#members! m[a].o m[b].o m[c].o; finish j;"
        "[commit j@2]; close; [closed]",
        {"S": 2, "m[a]": 1, "m[b]": 1, "m[c]": 1, "j": 2},
    ),
    "a member that runs is stopped when its spawner drops it; its ids are not used again": (
        SPAWNED, DIFF,
        f"{SPAWN}; start m[a]; read m[a] S.tasks.a; rev in.f=1; [subgraph S]; start S; read S in.f;"
        'finish S {"tasks": {}}; [commit S@2, stop m[a]@1]; stopped m[a]; rev in.f=0; [subgraph S]; start S;'
        'read S in.f;'
        'finish S {"tasks": {"a": 1}}; [commit S@3]; start m[a]; finish m[a]; [commit m[a]@2]',
        {"S": 3, "m[a]": 2, "j": 0},
    ),
    "without members the join still follows its spawner": (
        SPAWNED, DELTA,
        'start S; finish S {"tasks": {}}; [commit S@1]; start j; read j S.tasks.#members!; finish j;'
        '[commit j@1]; close; [closed]',
        {"S": 1, "j": 1},
    ),
    # --- unknown ---
    "row 11: an unknown node has read everything from its start": (
        "U; V", {**DIGEST, **LOCAL, "U": {"unknown": ["reads"]}},
        "start U; start V; rev in.h=1; [subgraph U, stop U@1]; finish V; [commit V@1]; stopped U; start U; finish U;"
        "[commit U@2]; close; [closed]",
        {"U": 2, "V": 1},
    ),
    "unknown, global: a hit means a full restart": (
        "U; V", {"U": {"unknown": ["reads"]}},
        "start V; read V in.g; finish V; [commit V@1]; start U; finish U; [commit U@1]; rev in.h=1; [restart U V]",
        {"U": 1, "V": 1},
    ),
    "unknown, local: the node and what follows": (
        "U; V; W < U", {**LOCAL, "U": {"unknown": ["reads"]}},
        "start V; read V in.g; finish V; [commit V@1]; start U; finish U {\"o\": 1}; [commit U@1]; start W;"
        "read W U.o; finish W;"
        "[commit W@1]; rev in.h=1; [subgraph U W]; ~start V; start U; finish U; [commit U@2]; start W;"
        "read W U.o; finish W;"
        "[commit W@2]; close; [closed]",
        {"U": 2, "V": 1, "W": 2},
    ),
    "unknown edges: a full restart, whoever is hit": (
        "U; V", {**LOCAL, "U": {"unknown": ["edges"]}},
        "start U; read U in.f; finish U; [commit U@1]; start V; read V in.g; rev in.g=1; [restart U V, stop V@1];"
        "start U",
        {"U": 2, "V": 1},
    ),
    # --- failures ---
    "a retry runs on the newest snapshot": (
        "G", {**DIGEST, "G": {"retries": 1}},
        "start G; fail G flaky!; [retry G@1]; rev in.f=1; [subgraph]; start G; read G in.f; finish G; [commit G@2]",
        {"G": 2},
    ),
    "retries are exhausted": (
        "G; P < G", {"G": {"retries": 1}},
        "start G; read G in.f; fail G flaky!; [retry G@1]; start G; read G in.f; fail G flaky!; [fail G@2];"
        "~start G; ~start P;"
        "~close; rev in.f=1; [subgraph G P]; start G; read G in.f; finish G; [commit G@3]; start P; finish P;"
        "[commit P@1];"
        "close; [closed]",
        {"G": 3, "P": 1},
    ),
    "what cannot be retried fails at once": (
        "G", {"G": {"retries": 3}}, "start G; read G in.f; fail G broken; [fail G@1]; ~start G", {"G": 1},
    ),
    "a failure that an old value caused is rejected, not reported": (
        "G", DELTA,
        "start G; rev in.f=1; read G in.f; fail G old; [subgraph, reject G@1]; start G; read G in.f; finish G;"
        "[commit G@2]; close; [closed]", {"G": 2},
    ),
    "a failed node does not run again for what it did not read": (
        "G", DIFF, "start G; read G in.f; fail G bad; [fail G@1]; rev in.g=1; [subgraph]; ~start G; ~close", {"G": 1},
    ),
    "a failed node whose value comes back": (
        "G", DIFF,
        "start G; read G in.f; fail G bad; [fail G@1]; rev in.f=1; [subgraph G]; rev in.f=0; [subgraph]; ~start G;"
        "rev in.f=2; [subgraph G]; start G; read G in.f; finish G; [commit G@2]; close; [closed]", {"G": 2},
    ),
    "a node that committed and fails when it runs again takes its output back": (
        "G; P < G", DIFF,
        "start G; read G in.f; finish G; [commit G@1]; start P; read P G.o; finish P; [commit P@1]; rev in.f=1;"
        "[subgraph G];"
        "start G; read G in.f; fail G bad; [fail G@2]; ~start P; ~close; rev in.f=0; [subgraph G]; start G;"
        "read G in.f;"
        "finish G; [commit G@3]; ~start P; close; [closed]",
        {"G": 3, "P": 1},
    ),
    # --- stopping ---
    "a zombie's result is discarded": (
        "G", DELTA,
        "start G; read G in.f; rev in.f=1; [subgraph G, stop G@1]; read G@1 in.g; finish G@1; [discard G@1];"
        "~finish G@1;"
        "~stopped G@1; start G; read G in.f; rev in.f=2; [subgraph G, stop G@2]; fail G@2 late; [discard G@2];"
        "start G;"
        "read G in.f; rev in.f=3; [subgraph G, stop G@3]; stopped G@3; ~finish G@3; start G; read G in.f;"
        "finish G; [commit G@4]",
        {"G": 4},
    ),
    "a plain function cannot be stopped: fenced, its result discarded": (
        "G; H; K", {"sync": ("G", "H", "K")},
        "start G; read G in.f; start H; read H in.f; start K; read K in.f; rev in.f=1;"
        "[subgraph G H K, orphan G@1, orphan H@1, orphan K@1]; read G@1 in.g; finish G@1; [discard G@1];"
        "fail H@1 late;"
        "[discard H@1]; stopped K@1; start G; read G in.f; finish G; [commit G@2]",
        {"G": 2, "H": 1, "K": 1},
    ),
    "cancelled: nothing starts, and a late success changes nothing": (
        CHAIN, DELTA,
        f"{G1}; start P; read P G.o; cancel; [stop P@1]; ~start P; ~start G; ~cancel; ~close; finish P; [discard P@1];"
        "rev in.f=1; [refuse WorkflowClosed]",
        {"G": 1, "P": 1, "X": 0},
    ),
    # --- the other policies ---
    "suffix: everything from the first affected node on": (
        "A; B; C; D < A", SUFFIX,
        "start A; read A in.f; finish A; [commit A@1]; start B; read B in.g; finish B; [commit B@1]; start C;"
        "read C in.h; finish C;"
        "[commit C@1]; start D; read D A.o; rev in.g=1; [suffix B C D, stop D@1]; ~start A; start B; start C; start D",
        {"A": 1, "B": 2, "C": 2, "D": 2},
    ),
    "suffix: nothing is hit, nothing runs again": (
        "A; B", SUFFIX,
        "start A; read A in.f; finish A; [commit A@1]; rev in.g=1; [suffix]; ~start A", {"A": 1, "B": 0},
    ),
    "restart: everything runs again": (
        "A; B < A", RESTART,
        "start A; read A in.f; finish A; [commit A@1]; start B; rev in.g=1; [restart A B, stop B@1]; start A;"
        "finish A; [commit A@2];"
        "start B; finish B; [commit B@2]; close; [closed]",
        {"A": 2, "B": 2},
    ),
    "wait: the turn ends first, then everything runs again": (
        "A; B < A", WAIT,
        "start A; read A in.f; rev in.f=1; [deferred]; finish A; [commit A@1]; start B; read B A.o; finish B;"
        "[commit B@1, restart A B]; start A; read A in.f; finish A; [commit A@2]; start B; read B A.o; finish B;"
        "[commit B@2]; close; [closed]",
        {"A": 2, "B": 2},
    ),
    "wait: when nothing runs there is nothing to wait for": (
        "A", WAIT,
        "start A; finish A; [commit A@1]; rev in.f=1; [restart A]; start A; read A in.f; finish A;"
        "[commit A@2]",
        {"A": 2},
    ),
    "after the close nothing is revised": (
        "A", DELTA,
        "start A; finish A; [commit A@1]; close; [closed]; rev in.f=1; [refuse WorkflowClosed]; ~close; ~start A;"
        "~cancel",
        {"A": 1},
    ),
}  # fmt: skip


def played(play, graph_of, name):
    spec, options, history, starts = HISTORIES[name]
    options = dict(options)
    sync, chosen = options.pop("sync", ()), options.pop("policy", "revise")
    nodes = {key: options.pop(key) for key in list(options) if key.isupper()}
    game = play(graph_of(spec, sync=sync, **nodes), INPUTS, chosen, **options)
    game(history)
    return game, starts


@pytest.mark.parametrize("name", HISTORIES)
def test_history(play, graph_of, name):
    game, starts = played(play, graph_of, name)
    assert game.n_attempts == starts
    again = replay(game.graph, game.machine.journal, game.policy)
    assert again.journal == game.machine.journal
    assert again.fingerprint() == game.machine.fingerprint()


def test_every_transition_of_the_table_is_reached(play, graph_of):
    """By the histories above; a line of the table that no history needs should not be there."""
    reached = set().union(*(played(play, graph_of, name)[0].reached for name in HISTORIES))
    lines = {(state, what, after) for (state, what), afters in ATTEMPTS.items() for after in afters}
    assert reached == lines


# --- illegal events ---

STATES = {
    "running": ("G", {}, "start G", "G@1"),
    "waiting": ("G; P < G", DIFF, f"{G1}; start P; rev in.f=1; finish P", "P@1"),
    "committed": ("G", {}, G1, "G@1"),
    "failed": ("G", {}, "start G; fail G bad", "G@1"),
    "stopped": ("G", {}, "start G; read G in.f; rev in.f=1", "G@1"),
    "stopped and ended": ("G", {}, "start G; read G in.f; rev in.f=1; stopped G@1", "G@1"),
    "rejected": ("G", {}, "start G; rev in.f=1; read G in.f; finish G", "G@1"),
    "superseded": ("G", {}, f"{G1}; rev in.f=1; start G; finish G", "G@1"),
    "never started": ("G", {}, "start G", "G@7"),
    "sealed": ("G", {}, f"{G1}; close", "G@1"),
    "cancelled": ("G", {}, "start G; cancel; stopped G@1", "G@1"),
}
LEGAL = {
    ("running", "observe"), ("running", "finish"), ("running", "fail"),
    ("stopped", "observe"), ("stopped", "finish"), ("stopped", "fail"), ("stopped", "stopped"),
}  # fmt: skip
EVENTS = {
    "observe": lambda attempt: ev.Observe(attempt, ()),
    "finish": lambda attempt: ev.Finish(attempt, freeze({})),
    "fail": lambda attempt: ev.Fail(attempt, "late"),
    "stopped": lambda attempt: ev.Stopped(attempt),
}


@pytest.mark.parametrize("kind", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_what_an_attempt_reports_out_of_turn_changes_nothing(play, state, kind):
    graph, switches, history, attempt = STATES[state]
    game = play(graph, INPUTS, **switches)(history)
    before, length = game.machine.fingerprint(), len(game.machine.journal)
    event = EVENTS[kind](attempt)
    if (state, kind) in LEGAL:
        game.machine.handle(event)
        return
    with pytest.raises(IllegalEvent, match=re.escape(attempt)):
        game.machine.handle(event)
    assert (game.machine.fingerprint(), len(game.machine.journal)) == (before, length)


@pytest.mark.parametrize(
    ("history", "event", "message"),
    [
        ("", ev.Start("Z"), r"start 'Z': it is not part of the run - start only what machine\.ready\(\) names"),
        ("", ev.Start("P"), r"start 'P': it is pending, not ready"),
        ("start G", ev.Start("G"), r"start 'G': it is running, not ready"),
        (G1, ev.Start("G"), r"start 'G': it is committed, not ready"),
        (f"{G1}; start P; rev in.f=1", ev.Start("P"), r"start 'P': it is .*, not ready"),
        ("", ev.Close(), r"close: not everything is settled \(G is ready; P is pending.*\) - finish or revise first"),
        (G1, ev.Close(), r"P is ready"),
        ("cancel", ev.Start("G"), r"start is not possible: the run is cancelled - start a new run, or reopen this one"),
        ("cancel", ev.Cancel(), r"cancel is not possible: the run is cancelled"),
        ("cancel", ev.Close(), r"close is not possible: the run is cancelled"),
        ("", "finish G", r"str is not an event of the machine"),
        ("", None, r"NoneType is not an event"),
        ("", ev.Stop("G@1", "why"), r"Stop is not an event of the machine"),
    ],
)
def test_an_illegal_event_is_explained_and_changes_nothing(play, history, event, message):
    game = play("G; P < G", INPUTS)(history)
    before, length = game.machine.fingerprint(), len(game.machine.journal)
    with pytest.raises(IllegalEvent, match=message):
        game.machine.handle(event)
    assert (game.machine.fingerprint(), len(game.machine.journal)) == (before, length)


def test_an_illegal_event_tells_the_story_of_its_node(play):
    game = play(CHAIN, INPUTS)(f"{G1}; start P")
    with pytest.raises(IllegalEvent) as caught:
        game.machine.handle(ev.Finish("G@1", freeze({})))
    assert [line.split('"')[1] for line in caught.value.story][:3] == ["Start", "Started", "Observe"]
    assert all("G" in line for line in caught.value.story)


# --- revisions that are refused ---


def revision(id_, *changes):
    return ev.Revise(
        Revision(id_, tuple(Change("in", Op.SET, ("f",), 1) if each is None else each for each in changes))
    )


BAD = {
    "stale base": (
        Change("in", Op.SET, ("f",), 5, base=0), "StaleBase",
        r"revision 'bad' was made against version 0 of 'in', which is at 1 - read version 1, decide again.*base=1",
    ),
    "gap": (Change("in", Op.SET, ("f",), 5, base=2), "StaleBase", r"against version 2 of 'in', which is at 1"),
    "unknown artifact": (Change("inn", Op.SET, ("f",), 5), "RevisionRefused", r"no artifact is named 'inn' - inputs are in"),
    "no change": ((), "RevisionRefused", r"holds no change - give it at least one"),
    "no such place": (Change("in", Op.SET, ("f", "x"), 5), "PathError", r"in\.f is leaf and takes no set of 'x'"),
    "nothing to delete": (Change("in", Op.DELETE, ("z",)), "PathError", r"cannot delete in\.z"),
    "no list": (Change("in", Op.APPEND, ("f",), 5), "PathError", r"cannot append in\.f: in\.f is leaf, not a list"),
    "not JSON-like": (Change("in", Op.SET, ("f",), {1, 2}), "ValueNotCanonical", r"set is not JSON-like"),
    "numpy": (Change("in", Op.SET, ("f",), {"deep": [object()]}), "ValueNotCanonical", r"at \['deep'\]\[0\]"),
}  # fmt: skip


@pytest.mark.parametrize("together", [False, True], ids=["alone", "after a good change"])
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("chosen", ["revise", "wait"])
def test_a_bad_revision_is_refused_whole(play, name, together, chosen):
    change, error, message = BAD[name]
    game = play(CHAIN, {**INPUTS, "other": {"x": 0}}, chosen)
    game("rev in.g=1; start G; read G in.f; finish G; start P; read P G.o in.h")
    machine = game.machine
    before = (machine.version, dict(machine.inputs), dict(machine.counts), machine.ready(), game.outputs)
    good = [Change("other", Op.SET, ("x",), 9)] if together and change else []
    game.machine_takes(revision("bad", *good, *([change] if change else [])))
    (refused,) = game.told
    assert (type(refused), refused.revision, refused.error) == (ev.Refused, "bad", error)
    assert re.search(message, refused.message)
    assert (machine.version, dict(machine.inputs), dict(machine.counts), machine.ready(), game.outputs) == before
    assert game.facts()[-1] == f"refuse {error}"
    assert refused.current == (1 if error == "StaleBase" else None)
    game.machine_takes(revision("bad", None))
    assert isinstance(game.told[0], ev.Accepted | ev.Deferred), "a refused id may be sent again"


def test_a_base_that_is_current_is_accepted_and_the_rest_is_said_to_be_unconditional(play):
    game = play("G", INPUTS)
    for base, unconditional in ((0, False), (1, False), (None, True), (3, False)):
        game.machine_takes(revision(f"r{base}", Change("in", Op.SET, ("f",), base, base)))
        assert (game.told[0].version, game.told[0].unconditional) == (game.machine.version, unconditional)
    game.machine_takes(revision("twice", Change("in", Op.SET, ("f",), 1, 4), Change("in", Op.SET, ("g",), 1, 4)))
    assert game.machine.counts == {"in": 5}


@pytest.mark.parametrize("chosen", ["revise", "wait"])
def test_a_duplicate_is_acknowledged_and_applied_once(play, chosen):
    game = play(CHAIN, INPUTS, chosen)("start G; read G in.f")
    game.machine_takes(revision("r", Change("in", Op.SET, ("g",), 1)))
    version = game.machine.version
    game.machine_takes(revision("r", Change("in", Op.SET, ("g",), 2)))
    assert game.told == [ev.Duplicate("r")]
    assert game.machine.version == version
    assert game.machine.inputs["in"]["g"] == (0 if chosen == "wait" else 1)


def test_several_changes_take_effect_as_one(play):
    game = play("A; B; J < A B", {"in": {"f": 0}, "list": {"l": [1, 2]}})
    game("start A; read A in.f; start B; read B list.l[0]")
    game.machine_takes(
        revision("r", None, Change("list", Op.INSERT, ("l", 0), 0), Change("list", Op.APPEND, ("l",), 9))
    )
    assert game.machine.version == 1
    assert game.facts() == ["subgraph A B J", "stop A@1", "stop B@1"]
    assert game.machine.inputs == freeze({"in": {"f": 1}, "list": {"l": [0, 1, 2, 9]}})
    assert [delta.artifact for delta in game.told[0].deltas] == ["in", "list"]
    assert game.machine.counts == {"in": 1, "list": 1}


def test_a_deferred_base_counts_the_revisions_before_it(play):
    game = play("A", INPUTS, "wait")("start A; read A in.f")
    for id_, base, answer in (("r1", 0, ev.Deferred), ("r2", 0, ev.Refused), ("r3", 1, ev.Deferred)):
        game.machine_takes(revision(id_, Change("in", Op.SET, ("f",), id_, base)))
        assert type(game.told[0]) is answer
    assert game.machine.inputs["in"]["f"] == 0
    game("finish A")
    while game.machine.ready():
        game("start A; read A in.f; finish A")
    game("close")
    assert game.outputs["A"] == {"o": ["r3"]}


def test_a_stale_base_is_refused_wherever_it_stands_in_the_revision(play):
    game = play("G", {"in": {"f": 0, "g": 0}})("rev in.g=1")
    changes = (Change("in", Op.SET, ("g",), 9), Change("in", Op.SET, ("f",), 5, base=0))
    game.machine_takes(ev.Revise(Revision("bad", changes)))
    assert isinstance(game.told[0], ev.Refused)
    assert game.machine.inputs == freeze({"in": {"f": 0, "g": 1}})


# --- what is said, and the close ---


def test_a_plan_gives_its_reasons(play):
    game = play(CHAIN, INPUTS)(f"{G1}; start P; read P G.o in.h!; rev in.h=1")
    rows = {node: (action, why) for node, action, why in game.machine.plan.rows()}
    assert rows == {
        "P": ("cancel", "in.h changed (r1) and it read in.h as control"),
        "X": ("avoid", "it follows P, which r1 affects"),
    }
    game("stopped P@1; start P; read P G.o; finish P; start X; read X P.o; rev in.f=1")
    assert {row[0]: row[1] for row in game.machine.plan.rows()} == {"G": "recompute", "P": "recompute", "X": "cancel"}
    assert game.machine.plan.recompute_ratio == 1.0


def test_under_diff_what_hangs_on_the_outcome_is_said(play):
    game = play(CHAIN, INPUTS, **DIFF)(f"{G1}; {P1}; start X; read X P.o; rev in.f=1")
    rows = [(each.node, each.action, each.until) for each in game.machine.plan.nodes]
    assert rows == [("G", "recompute", ()), ("P", "reuse", ("G",)), ("X", "continue", ("P",))]
    assert game.machine.plan.affected == ("G",)
    assert game.machine.plan.recompute_ratio == pytest.approx(1 / 3)


def test_what_activates_a_node_is_a_control_read_of_its_certificate(play):
    """Row 8: a lane, and a member's own entry in what spawned it."""
    game = play(ROUTED, INPUTS)(f"{R_LEFT}; start a")
    spawned = play(SPAWNED, INPUTS)(f"{SPAWN}; start m[b]")
    found = {}
    for each in (game, spawned):
        for entry in each.machine.journal:
            if isinstance(entry, ev.Started):
                found[entry.node] = [(str(read.selector), read.selector.role, read.observed) for read in entry.reads]
    assert found == {
        "R": [], "S": [],
        "a": [("R.lane.#has:left", "control", True)],
        "m[b]": [("S.tasks.#has:b", "control", True)],
    }  # fmt: skip
    certificate = game.machine.attempts["a@1"].certificate
    assert [str(selector) for selector in certificate.selectors] == ["R.lane.#has:left"]
    assert (certificate.v_start, certificate.parents) == (1, (("R", "R@1"),))


def test_revisions_and_commits_draw_from_one_version_line(play):
    game = play(ROUTED, INPUTS, **DIFF)(f"{R_LEFT}; {A1}; rev in.g=1; start a; read a in.g; finish a; rev in.f=1")
    game(f"start R; read R in.f!; finish R {RIGHT}")
    drawn = [
        entry.version for entry in game.machine.journal if isinstance(entry, ev.Accepted | ev.Committed | ev.Retracted)
    ]
    assert drawn == list(range(1, len(drawn) + 1))
    assert game.machine.version == len(drawn)
    assert all(
        entry.delta.version == entry.version for entry in game.machine.journal if isinstance(entry, ev.Committed)
    )


def test_the_close_looks_at_every_certificate_once_more(play):
    """It must find nothing; that it can is shown by changing a value behind the machine's back."""
    game = play("G; P < G", INPUTS)(f"{G1}; {P1}")
    game.machine.values["in"] = game.machine.inputs["in"] = freeze({"f": 7, "g": 0, "h": 0})
    game.machine.validate = False
    game("close; []")
    assert (game.machine.state, game.machine.late_invalid, game.machine.ready()) == ("open", 1, ("G",))
    game("start G; read G in.f; finish G; start P; read P G.o; finish P; close")
    assert game.machine.state == "closed"
    assert game.outputs == {"G": {"o": [7]}, "P": {"o": [[7]]}}


def test_status_and_failures(play):
    game = play("G; P < G; Q", INPUTS)
    assert game.machine.status == "open"
    game("start G; fail G bad")
    assert (game.machine.status, game.machine.failures()) == ("open", {"G": "bad"})
    game("start Q; finish Q")
    assert (game.machine.status, game.machine.ready()) == ("failed", ())
    assert game.outputs == {"Q": {"o": []}}
    game("cancel")
    assert game.machine.status == "cancelled"


def test_coverage_never_gets_better(play):
    game = play("G", INPUTS, unknown="global")("start G")
    selector = game.look("G@1", "in.f").selector
    for coverage in (Coverage.COARSE, Coverage.COMPLETE):
        game.machine_takes(ev.Observe("G@1", (Read(selector, 0),), coverage))
    game("rev in.f=1; [restart G, stop G@1]")


# --- replaying a journal ---


def test_a_journal_that_is_written_and_read_replays_to_the_same_state(play):
    game = play(SPAWNED, INPUTS, **DIFF)(f"{SPAWN}; {MEMBERS}; {JOIN}; rev in.f=1; start S; read S in.f")
    lines = [ev.to_json(entry) for entry in game.machine.journal]
    again = replay(game.graph, map(ev.from_json, lines), game.policy)
    assert [ev.to_json(entry) for entry in again.journal] == lines
    assert again.fingerprint() == game.machine.fingerprint()
    again.handle(ev.Finish("S@2", freeze({"tasks": {"b": 2}})))
    game('finish S {"tasks": {"b": 2}}')
    assert again.fingerprint() == game.machine.fingerprint()


@pytest.mark.parametrize("cut", [0, 1])
def test_a_journal_of_another_run_is_refused(play, graph_of, cut):
    game = play("G", INPUTS)(G1)
    journal = game.machine.journal[cut:] if cut else [game.machine.journal[0]._replace(workflow="other")]
    with pytest.raises(ReviseLabError, match=r"it is not one of 'history' under 'revise'"):
        replay(game.graph, journal, game.policy)
    with pytest.raises(ReviseLabError, match=r"it is not one of"):
        replay(game.graph, [], game.policy)


def test_an_input_may_not_carry_the_name_of_a_node(graph_of):
    with pytest.raises(ReviseLabError, match="G names an input and a node - rename one of them"):
        Machine(graph_of("G"), {"G": {}}, policy("revise"))


def test_fingerprints_tell_states_apart(play):
    moves = ["", "start G", "start G; read G in.f", "start G; finish G", "rev in.f=1", "rev in.f=2", "cancel"]
    moves += ["start G; fail G bad", 'start G; finish G {"o": 1}', "start G; cancel"]
    prints = [play("G", INPUTS)(history).machine.fingerprint() for history in moves]
    assert len(set(prints)) == len(moves)
    assert prints == [play("G", INPUTS)(history).machine.fingerprint() for history in moves]
