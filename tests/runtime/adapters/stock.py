"""A process of its own in which LangGraph runs the shapes by itself: pickled (shape, inputs) in, pickled outcomes out."""

import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from shapes import reference, run_virtual

if __name__ == "__main__":
    outcomes = [run_virtual(reference(*each)) for each in pickle.load(sys.stdin.buffer)]
    assert not any(name.startswith("revise_lab.runtime") for name in sys.modules), "this is to be LangGraph alone"
    pickle.dump(outcomes, sys.stdout.buffer)
