"""The tour as a person meets it: opened in JupyterLab, all cells run, the graph seen to change colour."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
# Sampled in the page, because a state may last less than a round trip to the browser.
WATCH = """
() => {
  window.seen = {};
  const note = () => document.querySelectorAll('.jp-Cell').forEach((cell, i) =>
    cell.querySelectorAll('svg:has([data-node])').forEach((drawing, j) =>
      drawing.querySelectorAll('[data-node]').forEach((group) => {
        const fill = group.querySelector('rect').getAttribute('fill');
        (window.seen[`cell ${i}, drawing ${j}, ${group.dataset.node}`] ??= {})[group.dataset.state] = fill;
      })));
  new MutationObserver(note).observe(document.body, {subtree: true, childList: true, attributes: true});
  note();
}
"""
STATE = """
() => {
  const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map((p) => p.textContent);
  const status = document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status ?? '';
  const kernel = document.querySelector('.jp-KernelName')?.textContent ?? 'No Kernel';
  return {prompts, status, kernel};
}
"""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@contextmanager
def _jupyter(folder: Path, home: Path):
    """Serve a folder from this environment, with a home of its own and a token, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Cells out of view would leave the page, and their drawings with them.
    tracker = home / "settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    tracker.parent.mkdir(parents=True)
    tracker.write_text('{"windowingMode": "none"}')
    token = secrets.token_hex(16)
    private = {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    private |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "spaces")}
    private |= {"HOME": str(home), "IPYTHONDIR": str(home / "ipython"), "JUPYTER_TOKEN": token}
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    options += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = home / "jupyter.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options, f"--notebook-dir={folder}"],
            env=os.environ | private,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    base = f"http://127.0.0.1:{port}"
    try:
        _wait_for(
            lambda: _answers(f"{base}/api?token={token}"), 90, lambda: f"JupyterLab is not up:\n{log.read_text()}"
        )
        yield base, token
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def _wait_for(ready, limit_s: float, complaint):
    end = time.monotonic() + limit_s
    while not (value := ready()):
        if time.monotonic() > end:
            pytest.fail(complaint())
        time.sleep(0.25)
    return value


def _copy_tour(folder: Path) -> None:
    """Copy what the notebook may look for beside it, so that a run leaves no trace in the tree."""
    for name in ("notebooks", "configs", "data"):
        shutil.copytree(ROOT / name, folder / name)


def _run_all(page, url: str) -> None:
    page.goto(url, wait_until="domcontentloaded", timeout=120_000)
    page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=120_000)
    _wait_for(lambda: _has_kernel(page), 120, lambda: f"no kernel: {page.evaluate(STATE)}")
    page.evaluate(WATCH)
    page.click('.lm-MenuBar-itemLabel:text-is("Run")')
    page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')


def _has_kernel(page) -> bool:
    """Look twice: without a kernel, the indicator is idle too."""
    state = page.evaluate(STATE)
    page.wait_for_timeout(500)
    return state == page.evaluate(STATE) and state["status"] == "idle" and state["kernel"] != "No Kernel"


def _finished(page) -> bool:
    state = page.evaluate(STATE)
    started = any(_is_run(prompt) for prompt in state["prompts"])
    return state["status"] == "idle" and started and not any("*" in prompt for prompt in state["prompts"])


def _is_run(prompt: str) -> bool:
    return prompt.strip("[]: \xa0").isdigit()


def _saved(path: Path) -> list:
    """Code cells of the notebook as JupyterLab saved it; empty until all of them have run, or one has failed."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return cells if all(cell["execution_count"] for cell in cells) or _errors(cells) else []


def _errors(cells: list) -> list[str]:
    return [out["evalue"] for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]


def test_the_tour_runs_in_jupyterlab_and_the_graph_changes_colour(tmp_path):
    assert Path(CHROMIUM).exists(), f"no Chromium at {CHROMIUM}: apt-get install chromium, or set CHROMIUM"
    folder = tmp_path / "work"
    _copy_tour(folder)
    tour = folder / "notebooks/00_tour.ipynb"
    with _jupyter(folder, tmp_path / "home") as (base, token), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1500, "height": 4000})
        try:
            _run_all(page, f"{base}/lab/tree/notebooks/00_tour.ipynb?token={token}&reset")
            _wait_for(lambda: _finished(page), 300, lambda: f"cells did not finish: {page.evaluate(STATE)}")
            page.wait_for_timeout(500)
            seen = page.evaluate("() => window.seen")
            page.keyboard.press("Control+s")
            cells = _wait_for(lambda: _saved(tour), 30, lambda: f"a cell did not run: {page.evaluate(STATE)}")
        finally:
            page.screenshot(path=tmp_path / "tour.png")
            browser.close()
    assert _errors(cells) == []
    recoloured = {node: fills for node, fills in seen.items() if len(set(fills.values())) >= 2}
    assert recoloured, f"no node changed colour; seen: {seen}"
