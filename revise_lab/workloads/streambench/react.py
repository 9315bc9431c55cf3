"""A ReAct agent over OpenAI function calling, and a scripted endpoint that answers with real tool calls.

The agent works with any OpenAI-compatible endpoint. The endpoint here is no model: it rebuilds specification and memory
from the conversation that it is sent and decides as the deterministic agent does (emulated). With it the whole way of a
tool call is exercised, and a run over HTTP must give the trace of the run in process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from revise_lab.errors import EndpointError
from revise_lab.records.effect import Reversibility
from revise_lab.runtime.endpoint import KEY_VARIABLE, NO_KEY
from revise_lab.runtime.reply import CHARS_PER_TOKEN
from revise_lab.serving.server import MODEL, EmbeddedServer, LogEntry

from .agent import Call, PlannedAgent
from .scenarios import NUMBERS, SCENARIOS, Scenario
from .stream import Epistemic, Turn

if TYPE_CHECKING:
    from openai import OpenAI
    from starlette.requests import Request

_SYSTEM: Final = (
    "You carry out the task {name} with tools, one call at a time. First say in a sentence what comes next, then call the"
    " tool. Each tool is used once unless the task changes; a clause of 'none' asks for nothing. When the user revises the"
    " task, work to the revised clauses. When everything is done, answer without a tool call."
)
_COMPATIBLE: Final = (
    "The task {name} has been revised. Does this act remain valid under the revised clauses?"
    ' Answer with JSON only: {{"compatible": true}} or {{"compatible": false}}.'
)
_CLAUSES: Final = "Clauses: "
_ACT: Final = "Act: "


def tools(scenario: Scenario) -> list[dict[str, Any]]:
    """Return the tools of a task as function schemas."""
    found = []
    for step in scenario.steps:
        properties = {name: {"type": "integer" if name in NUMBERS else "string"} for name in step.args}
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(step.args),
            "additionalProperties": False,
        }
        about = f"{step.name.replace('_', ' ')} ({step.verb}), from: {json.dumps(dict(step.args))}"
        found.append({"type": "function", "function": {"name": step.name, "description": about, "parameters": schema}})
    return found


def conversation(scenario: Scenario, state: Epistemic) -> list[dict[str, Any]]:
    """Return what the agent knows as chat messages: the task, the remembered turns, the injection in its place."""
    told = state.told_after
    clauses = dict(scenario.clauses) if told else state.spec
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM.format(name=scenario.name)},
        {"role": "user", "content": f"{scenario.task}\n{_CLAUSES}{json.dumps(clauses)}"},
    ]
    for at, turn in enumerate(state.turns):
        if at == told:
            messages.append(_told(state))
        call = {"name": turn.step, "arguments": json.dumps(dict(turn.args))}
        number = f"call_{at}"
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [{"id": number, "type": "function", "function": call}]}
        )
        messages.append({"role": "tool", "tool_call_id": number, "content": json.dumps(dict(turn.result))})
    if told is not None and told >= len(state.turns):
        messages.append(_told(state))
    return messages


def _told(state: Epistemic) -> dict[str, Any]:
    said = state.told.text if state.told else ""
    return {"role": "user", "content": f"{said}\n{_CLAUSES}{json.dumps(state.spec)}"}


def open_client(base_url: str, timeout_s: float = 120.0) -> OpenAI:
    """Return a client for an endpoint; the key comes from the environment variable ``REVISE_LAB_API_KEY``.

    Parameters
    ----------
    base_url : str
        URL with ``/v1``.
    timeout_s : float
        Longest time for one request.
    """
    import openai

    local = urlsplit(base_url).hostname in ("127.0.0.1", "::1", "localhost")
    # a proxy from the environment must not stand between us and our own machine
    direct = openai.DefaultHttpxClient(trust_env=False) if local else None
    key = os.environ.get(KEY_VARIABLE) or NO_KEY
    return openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout_s, http_client=direct)


class ReactAgent:
    """An agent that asks a model for every step.

    Parameters
    ----------
    scenario : Scenario
        The task.
    client : OpenAI
        Where the model is, see `open_client`; runs may share it.
    model : str
        Name of the model.
    temperature : float
        As published: 0.2; compatibility calls are made at 0.
    """

    def __init__(self, scenario: Scenario, client: OpenAI, model: str = MODEL, *, temperature: float = 0.2) -> None:
        self.scenario, self.model, self.temperature = scenario, model, temperature
        self._client = client
        self._tools = {"tools": tools(scenario), "tool_choice": "auto"}
        self._errors: list[dict[str, Any]] = []
        self._last: list[Turn] = []
        self.n_calls = 0

    def next(self, state: Epistemic) -> Call:
        """Ask the model for the next step; arguments that are no JSON are handed on as the text that came."""
        if state.turns[-1:] != self._last:  # a step that is made again leaves as many turns as there were
            self._errors, self._last = [], state.turns[-1:]
        messages = [*conversation(self.scenario, state), *self._errors]
        reply = self._ask(messages=messages, temperature=self.temperature, **self._tools)
        message, usage = reply.choices[0].message, reply.usage
        spent = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        if not message.tool_calls:
            return Call(message.content or "", "", {}, *spent)
        asked = message.tool_calls[0].function
        try:
            args = json.loads(asked.arguments)
        except ValueError:
            args = asked.arguments
        return Call(message.content or "", asked.name, args, *spent)

    def compatible(self, turn: Turn, spec: Mapping[str, Any]) -> bool:
        """Ask the model whether an act remains valid; anything but a clear yes is a no."""
        act = {"tool": turn.step, "arguments": dict(turn.args), "made under": dict(turn.clauses)}
        content = f"{_ACT}{json.dumps(act)}\n{_CLAUSES}{json.dumps(dict(spec))}"
        system = {"role": "system", "content": _COMPATIBLE.format(name=self.scenario.name)}
        reply = self._ask(messages=[system, {"role": "user", "content": content}], temperature=0.0)
        try:
            return json.loads(reply.choices[0].message.content or "")["compatible"] is True
        except (ValueError, LookupError, TypeError):
            return False

    def answered(self, call: Call, complaint: str) -> None:
        """Tell the model, with its next request, what was wrong with its call."""
        number = f"refused_{len(self._errors)}"
        said = call.args if isinstance(call.args, str) else json.dumps(call.args)
        asked = {"id": number, "type": "function", "function": {"name": call.tool, "arguments": said}}
        self._errors += [
            {"role": "assistant", "content": call.thought, "tool_calls": [asked]},
            {"role": "tool", "tool_call_id": number, "content": json.dumps({"error": complaint})},
        ]

    def _ask(self, **body: Any) -> Any:
        import openai
        from openai.types.chat import ChatCompletion

        self.n_calls += 1
        try:
            # the body goes as it is: `create` walks through every message and schema again at every call, which takes
            # longer than all the rest of a run
            body["model"] = self.model
            reply = self._client.post("/chat/completions", cast_to=ChatCompletion, body=body)
        except openai.OpenAIError as error:
            raise EndpointError(
                f"{self._client.base_url} did not answer a tool-calling request ({type(error).__name__}: {error}) - see"
                " whether the server runs, serves this model and knows tools"
            ) from None
        if not reply.choices:
            raise EndpointError(
                f"{self._client.base_url} answered without a choice - see whether the server knows tools"
            )
        return reply


class ToolServer(EmbeddedServer):
    """The scripted endpoint, in a thread of this process, on loopback.

    Parameters
    ----------
    garbled : collection of int
        Numbers of the requests whose tool arguments are cut off in the middle, as small models do.
    """

    def __init__(self, garbled: Collection[int] = ()) -> None:
        super().__init__()
        self.garbled = frozenset(garbled)

    async def _chat(self, request: Request) -> Any:
        from starlette.responses import JSONResponse

        body = await request.json()
        if "response_format" in body:  # the judge: some score that fits, from a hash
            return await super()._chat(request)
        entry = LogEntry(next(self._ids), started_s=self._now())
        self._log.append(entry)
        message = self._decide(body["messages"], garble=entry.id in self.garbled)
        prompt, output = (len(json.dumps(part)) // CHARS_PER_TOKEN for part in (body["messages"], message))
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        entry.prompt_tokens, entry.tokens = prompt, output
        self._finish(entry, "completed")
        return JSONResponse(
            {
                "id": f"chatcmpl-{entry.id}",
                "object": "chat.completion",
                "created": 0,
                "model": body.get("model", MODEL),
                "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}],
                "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
            }
        )

    def _decide(self, messages: list[dict[str, Any]], *, garble: bool) -> dict[str, Any]:
        said = [message["content"] for message in messages if message["role"] == "user"]
        spec = json.loads(said[-1].rpartition(_CLAUSES)[2])
        if said[-1].startswith(_ACT):
            act, _ = json.JSONDecoder().raw_decode(said[-1].removeprefix(_ACT))
            holds = all(spec[clause] == seen for clause, seen in act["made under"].items())
            return {"content": json.dumps({"compatible": holds})}
        scenario = next(each for name, each in SCENARIOS.items() if name in messages[0]["content"])
        results = {m["tool_call_id"]: json.loads(m["content"]) for m in messages if m["role"] == "tool"}
        turns = []
        for message in messages:
            for asked in message.get("tool_calls") or ():
                name, result = asked["function"]["name"], results[asked["id"]]
                if "error" not in result:
                    turns.append(Turn(name, Reversibility.INERT, {}, result, (), {}, None))
        call = PlannedAgent(scenario).next(Epistemic(spec, turns))
        if not call.tool:
            return {"content": call.thought}
        arguments = json.dumps(call.args)
        function = {"name": call.tool, "arguments": arguments[: len(arguments) // 2] if garble else arguments}
        asked = {"id": f"call_{len(turns)}", "type": "function", "function": function}
        return {"content": call.thought, "tool_calls": [asked]}
