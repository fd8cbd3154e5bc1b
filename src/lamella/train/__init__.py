"""Training: configuration, the loop, checkpoints, evaluation and generation."""

from lamella.train.checkpoint import CheckpointError
from lamella.train.config import TrainConfig
from lamella.train.evaluate import Evaluation, evaluate, evaluate_path, open_model
from lamella.train.folder import RunError, read_config
from lamella.train.generate import decode_speed, generate
from lamella.train.interrupts import Interrupted
from lamella.train.loop import NonFiniteLoss, resume, train
from lamella.train.ship import export_run

__all__ = [
    "CheckpointError",
    "Evaluation",
    "Interrupted",
    "NonFiniteLoss",
    "RunError",
    "TrainConfig",
    "decode_speed",
    "evaluate",
    "evaluate_path",
    "export_run",
    "generate",
    "open_model",
    "read_config",
    "resume",
    "train",
]
