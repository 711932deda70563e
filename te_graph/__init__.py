"""te_graph: CUDA graphs for the whole training step, with the numbers of eager execution bit for bit."""

from te_graph._build import build_info, load_extension

load_extension()

from te_graph.gradients import reset_main_grads  # noqa: E402 (needs the extension)
from te_graph.graphed import make_graphed_callables  # noqa: E402
from te_graph.graphs import capture_to_graph, create_graph, replay_graph  # noqa: E402
from te_graph.recorder import CaptureError, Recorder  # noqa: E402
from te_graph.report import info  # noqa: E402
from te_graph.sequence import graphed  # noqa: E402

__all__ = [
    "CaptureError",
    "Recorder",
    "build_info",
    "capture_to_graph",
    "create_graph",
    "graphed",
    "info",
    "make_graphed_callables",
    "replay_graph",
    "reset_main_grads",
]
