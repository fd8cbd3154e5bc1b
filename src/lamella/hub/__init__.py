"""Hugging Face models: presets, accounting, saving and loading, export. Importing this registers with transformers."""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("lamella.hub needs transformers: pip install 'lamella[lm]'") from error

from lamella.hub.accounting import Account, LayerAccount, account, fixed_flop_ratio, format_account
from lamella.hub.export import export, fast_tokenizer, write_directory
from lamella.hub.loading import load_model
from lamella.hub.presets import PRESETS, build_model, ffn_rules, is_ffn, load_config, model_class
from lamella.hub.quiet import no_progress_bars
from lamella.hub.saving import LamellaConfig

__all__ = [
    "PRESETS",
    "Account",
    "LamellaConfig",
    "LayerAccount",
    "account",
    "build_model",
    "export",
    "fast_tokenizer",
    "ffn_rules",
    "fixed_flop_ratio",
    "format_account",
    "is_ffn",
    "load_config",
    "load_model",
    "model_class",
    "no_progress_bars",
    "write_directory",
]
