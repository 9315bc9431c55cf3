"""Places for the nodes of a workflow: longest-path layers, barycentre order, least-squares heights.

The classic layered drawing of Sugiyama, Tagawa and Toda (1981) with a passage for a long edge in each layer that it
crosses. Ten nodes are the common case; every step is deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from revise_lab.errors import WorkflowError

Node = tuple[str, str, str, str]
Edge = tuple[str, str] | tuple[str, str, str]

#: A node, or the passage of a long edge through a layer.
Key = tuple[str] | tuple[str, str, int]

#: Height of a node with its note and the gap to the next; room of a passage; gap between layers.
ROW, CHANNEL, COLUMN_GAP = 70.0, 16.0, 48.0


def ranks(nodes: Sequence[Node], edges: Sequence[Edge]) -> dict[str, int]:
    """Give every node its layer: the length of the longest path that leads to it.

    Parameters
    ----------
    nodes : sequence of (name, kind, state, note)
    edges : sequence of (parent, child) or (parent, child, role)

    Returns
    -------
    dict of str to int
        Parents first; within a layer in the order given.

    Raises
    ------
    WorkflowError
        A name used twice, an edge to an unknown node, or a cycle.
    """
    parents: dict[str, list[str]] = {node[0]: [] for node in nodes}
    if len(parents) != len(nodes):
        twice = sorted(name for name, n in Counter(node[0] for node in nodes).items() if n > 1)
        raise WorkflowError(f"cannot draw: node name used twice: {', '.join(twice)}. Give every node its own name.")
    for parent, child, *_ in edges:
        if parent not in parents or child not in parents:
            missing = child if parent in parents else parent
            raise WorkflowError(
                f"cannot draw: edge {parent} -> {child} names {missing!r}, which is not a node. Add the node first."
            )
        parents[child].append(parent)
    rank: dict[str, int] = {}
    while len(rank) < len(parents):
        ready = [name for name in parents if name not in rank and all(parent in rank for parent in parents[name])]
        if not ready:
            stuck = ", ".join(name for name in parents if name not in rank)
            raise WorkflowError(f"cannot draw: a cycle among or above {stuck}. A workflow has no way back.")
        for name in ready:
            rank[name] = max((rank[parent] + 1 for parent in parents[name]), default=0)
    return rank


def arrange(
    nodes: Sequence[Node], edges: Sequence[Edge], box: float
) -> tuple[dict[Key, tuple[float, float]], list[list[Key]]]:
    """Find a place for every node and a route for every edge.

    Parameters
    ----------
    nodes, edges
        As for `ranks`.
    box : float
        Width of a node, px.

    Returns
    -------
    places : dict of Key to (x, y)
        Left end and middle height, px; the layout starts at (0, 0). The states have no part in it.
    routes : list of list of Key
        For each edge the parent, the passages, the child.
    """
    rank = ranks(nodes, edges)
    routes: list[list[Key]] = []
    columns: list[list[Key]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for name, layer in rank.items():
        columns[layer].append((name,))
    for parent, child, *_ in edges:
        passages: list[Key] = [(parent, child, layer) for layer in range(rank[parent] + 1, rank[child])]
        routes.append([(parent,), *passages, (child,)])
        for layer, key in enumerate(passages, rank[parent] + 1):
            if key not in columns[layer]:
                columns[layer].append(key)
    near: dict[Key, list[Key]] = {key: [] for column in columns for key in column}
    for route in routes:
        for a, b in pairwise(route):
            near[a].append(b)
            near[b].append(a)
    columns = _ordered(columns, near)
    y = {key: at for column in columns for key, at in zip(column, _spread(column, [0.0] * len(column)), strict=True)}
    for sweep in range(40):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            wanted = [sum(y[n] for n in near[key]) / len(near[key]) if near[key] else y[key] for key in column]
            y.update(zip(column, _spread(column, wanted), strict=True))
    top = min((at - _room(key) / 2 for key, at in y.items()), default=0.0)
    step = box + COLUMN_GAP
    return {key: (step * i, round(y[key] - top, 1)) for i, column in enumerate(columns) for key in column}, routes


def _room(key: Key) -> float:
    return ROW if len(key) == 1 else CHANNEL


def _ordered(columns: list[list[Key]], near: Mapping[Key, list[Key]]) -> list[list[Key]]:
    """Sort each layer by the mean place of its neighbours; keep the sweep with the fewest crossings."""
    best, fewest = columns, _crossings(columns, near)
    for sweep in range(12):
        forward = sweep % 2 == 0
        columns = [list(column) for column in columns]
        for i in range(1, len(columns)) if forward else range(len(columns) - 2, -1, -1):
            fixed = {key: at for at, key in enumerate(columns[i - 1 if forward else i + 1])}
            own = {key: float(at) for at, key in enumerate(columns[i])}
            for key in columns[i]:
                places = [fixed[n] for n in near[key] if n in fixed]
                own[key] = sum(places) / len(places) if places else own[key]
            columns[i].sort(key=own.__getitem__)
        crossed = _crossings(columns, near)
        if crossed < fewest:
            best, fewest = columns, crossed
    return best


def _crossings(columns: list[list[Key]], near: Mapping[Key, list[Key]]) -> int:
    total = 0
    for left, right in pairwise(columns):
        at = {key: i for i, key in enumerate(right)}
        ends = [at[n] for key in left for n in sorted((n for n in near[key] if n in at), key=at.__getitem__)]
        total += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
    return total


def _spread(column: list[Key], wanted: list[float]) -> list[float]:
    """Least-squares places in the given order, no two nearer than their boxes allow (pool adjacent violators)."""
    offsets, offset, last = [], 0.0, 0.0
    for i, key in enumerate(column):
        room = _room(key)
        offset += (room + last) / 2 if i else 0.0
        offsets.append(offset)
        last = room
    blocks: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        total, size = want - offset, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / size:
            before = blocks.pop()
            total, size = total + before[0], size + before[1]
        blocks.append((total, size))
    bases = [total / size for total, size in blocks for _ in range(size)]
    return [base + offset for base, offset in zip(bases, offsets, strict=True)]
