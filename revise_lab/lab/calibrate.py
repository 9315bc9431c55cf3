"""``revise-lab calibrate``: probe a server that answers, and write a profile of it.

What each probe showed is in a file before the next is sent; from that file a profile can be fitted again without the
server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from revise_lab import draw
from revise_lab.errors import ConfigError, EndpointError
from revise_lab.lab.files import utc, write_atomic
from revise_lab.runtime.endpoint import KEY_VARIABLE, EndpointDown
from revise_lab.runtime.probing import Prober
from revise_lab.serving import probes
from revise_lab.serving.calibrate import KINDS, MAPE_LIMIT, PARAMETERS, Calibration, calibrate
from revise_lab.serving.cost import Profile, load
from revise_lab.serving.probes import Probe, Seen

_EPILOG = """\
It takes about 200 short requests, some minutes on a GPU; nothing else should use the server meanwhile.

examples:
  revise-lab calibrate --base-url http://127.0.0.1:30000/v1 --model Qwen/Qwen3-14B --flags "--tp 1, SGLang 0.5.14"
  revise-lab calibrate --base-url http://127.0.0.1:8080/v1 --model smollm2-135m --max-context 512 --slots 4 --requests 40
  revise-lab calibrate --raw results/calibration/smollm2-135m.jsonl --profile my-device.json      fit again, no server

--profile names what is known of the device and the model (bandwidth, FLOPS, parameters, bytes of KV cache a token). What
the requests cannot tell apart stays as it is there, and is listed. At most six numbers are fitted; about a fifth of the
steps is held out. Exit code 0: calibrated. 1: the profile is written, but it is not calibrated and its results say emulated:
the held-out error is above 15 %, the way to the server takes longer than half a token, or the server is an emulation.
"""
_CHUNKS_PER_S = 3000
"""Beyond that the client may be what is measured."""
_IN_A_ROW = 3


def add_commands(command: Callable[..., Any]) -> None:
    """Add the command to a command line."""
    sub = command("calibrate", _calibrate, "measure an OpenAI-compatible server and write a profile of it", _EPILOG)
    sub.options(
        base_url=(str, "URL", "endpoint with /v1; a key comes from " + KEY_VARIABLE),
        model=(str, "NAME", "model as the server names it"),
        raw=(Path, "FILE", "fit what an earlier run has measured; no server is asked"),
        profile=("h100-qwen3-14b-sglang", "NAME",
                 "what is known: a shipped profile or a .json file (default: %(default)s)"),
        out=(Path, "FILE", "default: results/calibration/MODEL.json, raw beside it"),
        max_context=(int, "TOKENS", "longest prompt and answer (default: 8704 or less)"),
        slots=(int, "N", "most streams at once (default: what the server says, or 64)"),
        requests=(int, "N", "most requests besides 3 to warm up (default: all, 205)"),
        seed=(0, "N", "of the held-out requests and the bootstrap"),
        flags=("", "TEXT", "how the server was started; kept in the profile"),
    )  # fmt: skip


def _calibrate(arguments: argparse.Namespace) -> int:
    base = load(arguments.profile)
    if arguments.raw is None and not (arguments.base_url and arguments.model):
        raise ConfigError("calibrate needs --base-url and --model, or --raw with a file of an earlier run")
    name = re.sub(r"[^\w.-]+", "-", arguments.model or (arguments.raw.stem if arguments.raw else ""))
    out = arguments.out or Path("results/calibration") / f"{name}.json"
    if out.suffix != ".json":
        raise ConfigError(f"--out {out} must end in .json, so that --profile takes it")
    raw = arguments.raw or out.with_suffix(".jsonl")
    if arguments.raw is None:
        try:
            asyncio.run(probe_server(arguments, raw))
        except KeyboardInterrupt:
            _say(f"\ninterrupted; what was measured by then is in {raw}: revise-lab calibrate --raw {raw}")
            return 130
    about, seen = read(raw)
    result, reasons = conclude(about, seen, base, seed=arguments.seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    result.profile.save(out)
    print(render(result, reasons))
    print(f"raw:     {raw}\nprofile: {out}")
    return 1 if reasons else 0


# --- asking ----------------------------------------------------------------------------------------------------------


async def probe_server(arguments: argparse.Namespace, raw: Path) -> None:
    """Send all probes and write what each showed to a file of JSON lines, the server first.

    Raises
    ------
    ConfigError
        The server does not have the model.
    EndpointError
        It is down, refuses the requests or does not count tokens.
    """
    asked = Prober(arguments.base_url, arguments.model, secrets.token_hex(3))
    try:
        server = await asked.warm_up()
        context = min(arguments.max_context or 8704, server["context_tokens"] or sys.maxsize)
        slots = arguments.slots or server["slots"] or 64
        chosen = probes.plan(context, slots, arguments.requests, arguments.seed)
        head = {"model": arguments.model, "date": utc(), "flags": arguments.flags, "server": server, "context": context}
        write_atomic(raw, (json.dumps(head) + "\n").encode())
        n, work = sum(len(each.prompts) for each in chosen), sum(map(_work, chosen))
        there_ms = 1e3 * server["round_trip_s"]
        _say(f"{n} requests in {len(chosen)} probes; the way there and back takes {there_ms:.2f} ms")
        started, done, failures = time.monotonic(), 0.0, 0
        with raw.open("a") as lines:
            for number, each in enumerate(chosen, 1):
                left = f", {(time.monotonic() - started) * (work / done - 1):.0f} s left" if done else ""
                _progress(f"[{number}/{len(chosen)}] {each}{left}", last=number == len(chosen))
                try:
                    row: dict[str, Any] = {"seen": await asked.measure(each)}
                    failures = 0
                except EndpointError as error:
                    failures += 1
                    if isinstance(error, EndpointDown) or failures == _IN_A_ROW:
                        raise
                    row = {"failed": str(each), "error": str(error)}
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                done += _work(each)
    finally:
        await asked.model.aclose()


def _work(probe: Probe) -> float:
    """Weigh a probe for the time left: decoding steps, and prompts at a twentieth of one each token."""
    return max(probe.outputs) + sum(probe.prompts) / 20


# --- concluding ------------------------------------------------------------------------------------------------------


def read(raw: Path) -> tuple[dict[str, Any], list[Seen]]:
    """Read what an earlier run has measured: the server, and what each probe showed.

    Raises
    ------
    ConfigError
        It is no such file.
    """
    from pydantic import TypeAdapter

    try:
        head, *rows = [json.loads(line) for line in raw.read_text().splitlines()]
        seen = TypeAdapter(list[Seen]).validate_python([row["seen"] for row in rows if "seen" in row])
        failed = [f"{row['failed']} failed: {row['error']}" for row in rows if "failed" in row]
        return head | {"failed": failed}, seen
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        first = str(error).partition("\n")[0]  # pydantic says more, and where to read about it
        what = f"{raw} is no file of measurements ({first})"
        raise ConfigError(f"{what} - calibrate writes one beside the profile") from None


def conclude(
    about: dict[str, Any], seen: list[Seen], base: Profile, *, draws: int = 200, seed: int = 0
) -> tuple[Calibration, list[str]]:
    """Fit, and say why the result is not calibrated, if it is not.

    Parameters
    ----------
    about : dict
        The server, as :func:`read` gives it.
    seen : list of Seen
        What the probes showed.
    base : Profile
        Device and model.
    draws, seed : int
        Of the bootstrap.

    Returns
    -------
    Calibration, list of str
        With everything that the server tells of itself in the profile; reasons against calling it calibrated.
    """
    rows, held_out = (probes.step_rows(_of(seen, *kinds)) for kinds in (("idle", "decode", "batch"), ("mixed",)))
    found = calibrate(rows, held_out, base, draws=draws, seed=seed)
    server, warnings = about["server"], [*found.warnings, *about["failed"], *_doubts(seen)]
    reasons = list(_reasons(found, server, min(row.seconds for row in rows if row.n_decode)))
    aborts = [delay for each in _of(seen, "abort") if (delay := probes.abort_delay(each)) is not None]
    if not aborts:
        warnings.append("what a closed stream costs was not seen; abort_delay_s is assumed")
    measurement = {name: about[name] for name in ("model", "date", "flags", "server", "context")} | {
        "held_out_mape": round(found.held_out_mape, 4),
        "held_out_rows": {kind: len(found.errors[kind]) for kind in KINDS},
        "fitted": list(found.fitted),
        "request_s": found.request_s,
        "abort": aborts[0][1] if aborts else None,
        "interference": next((each for each in map(probes.interference, _of(seen, "interference")) if each), None),
        "prefix": probes.prefix_saving(_of(seen, "prefix")),
        "warnings": warnings,
        "not_calibrated": reasons,
    }
    delay_s = {"abort_delay_s": aborts[0][0] if aborts else base.abort_delay_s}
    profile = found.profile.with_("measured" if aborts else "assumed", **delay_s)
    told_of = {name: server[name] for name in ("kv_capacity_tokens", "context_tokens")} | {
        "max_running": server["slots"]
    }
    for name, told in told_of.items():
        profile = profile.with_("specified" if told else "assumed", **{name: told or getattr(profile, name)})
    known = {name for name, source in profile.sources.items() if name not in found.fitted and source != "assumed"}
    profile = profile.with_(
        name=re.sub(r"[^\w.-]+", "-", f"{about['model']}-{about['date'][:10]}"),
        about=f"{about['model']} on {server['kind']}, measured over HTTP on {about['date'][:10]}; fitted on {base.name}.",
        calibrated=not reasons,
        bands={name: band for name, band in profile.bands.items() if name not in known},
        measurement=measurement,
    )
    return replace(found, profile=profile, warnings=warnings), reasons


def _of(seen: Iterable[Seen], *kinds: str) -> list[Seen]:
    return [each for each in seen if each.probe.kind in kinds]


def _doubts(seen: Iterable[Seen]) -> Iterator[str]:
    """Say what in the measurements may be other than it seems."""
    for each in _of(seen, "batch", "mixed"):
        if len(each.streams) > 1 and probes.together(each.streams) is None:
            yield f"{each.probe}: never all live at once, so it counts for nothing - lower --slots?"
    if (busiest := max(map(_chunks_per_s, seen))) > _CHUNKS_PER_S:
        yield f"{busiest:.0f} chunks/s came at times: this client may be what is slow"


def _reasons(found: Calibration, server: dict[str, Any], lone_s: float) -> Iterator[str]:
    """Say why the result must not be called calibrated."""
    if found.held_out_mape > MAPE_LIMIT:
        yield f"the held-out error is {found.held_out_mape:.1%}, above {MAPE_LIMIT:.0%}"
    if server["round_trip_s"] > lone_s / 2:
        took, token = f"{1e3 * server['round_trip_s']:.1f} ms", f"{1e3 * lone_s:.1f} ms"
        yield f"the way to the server and back takes {took}, over half a token ({token}) - run it beside the server"
    if server["emulated"]:
        yield "the server is an emulation"


def _chunks_per_s(seen: Seen) -> float:
    times = sorted(at_s for each in seen.streams for at_s in each.chunk_s)
    return len(times) / (times[-1] - times[0]) if len(times) > 100 else 0.0


def render(result: Calibration, reasons: Iterable[str]) -> str:
    """Return the parameters with their intervals, the errors, what else was seen, and the verdict."""
    profile, about = result.profile, result.profile.measurement
    rows = []
    for name in PARAMETERS:
        band = profile.bands.get(name) if name in result.fitted else None
        value = getattr(profile, name)
        rows.append((name, f"{value:.4g}", f"{band[0]:.4g} .. {band[1]:.4g}" if band else "", profile.sources[name]))
    if "request_s" in result.fitted:
        rows.append(("outside of it, a request (s)", f"{result.request_s:.4g}", "", "measured"))
    delay = "never" if profile.abort_delay_s is None else f"{profile.abort_delay_s:.3f}"
    shown = {"abort_delay_s": delay, "kv_capacity_tokens": f"{profile.kv_capacity_tokens}"}
    rows += [(name, value, "", profile.sources[name]) for name, value in shown.items()]
    lines = [draw.table_text(rows, ("parameter", "value", "95 % interval, given the rest", "source"))]
    for kind in ("fit", "prefill", "decode"):
        if some := [abs(each) for each in result.errors[kind]]:
            where = "over the rows of the fit" if kind == "fit" else f"held out, {kind}"
            mean = f"{sum(some) / len(some):.1%} mean error over {len(some)} steps"
            lines.append(f"{where}: {mean}, worst {max(some):.1%}")
    if about["interference"]:
        how, share = about["interference"]
        lines.append(f"a long prompt beside others: {how}, longest silence {share:.2f} of its prefill")
    if about["prefix"]:
        cached = ", ".join(map(str, about["prefix"]["cached_tokens"]))
        took = ", ".join(f"{each:.3f}" for each in about["prefix"]["first_text_s"])
        three = "one prompt three times, the last for another tenant"
        lines.append(f"{three}: {cached} tokens cached, {took} s to first text")
    lines += [f"warning: {each}" for each in result.warnings]
    lines.append(f"held-out error {result.held_out_mape:.1%}: {profile.label}")
    return "\n".join([*lines, *(f"NOT calibrated: {each}" for each in reasons)])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _progress(line: str, *, last: bool) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if last else "", file=sys.stderr, flush=True)
    else:
        _say(line)
