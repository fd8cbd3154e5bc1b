"""Turning a run into a model directory for others."""

import os
from typing import Any

from lamella.train.evaluate import open_model


def export_run(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    structured: bool = False,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Export the model of a run folder or a checkpoint as a Hugging Face directory; see `lamella.hub.export`.

    Returns: the export's report, with `of`, what was exported.
    Raises: ValueError, also for a checkpoint whose model is still guided.
    """
    from lamella.hub import export

    model, tokenizer, of = open_model(run)
    return {**export(model, tokenizer, out, structured, tolerance), "of": of}
