"""Run as a script in a fresh process: does an exported directory compute the logits that it should?

    python verify_export.py DIRECTORY BATCH.safetensors plain|structured [TEXT IDS_AS_JSON]

BATCH holds the model's input, and its expected output as "expected". The last line of stdout is one JSON document. In
a plain check lamella can't be imported, so that the directory is shown to need transformers alone.
"""

import json
import os
import sys


def main(directory: str, batch: str, kind: str, text: str | None = None, ids: str = "[]") -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    if kind == "plain":
        sys.modules["lamella"] = None  # type: ignore[assignment]  # from here on importing it is an ImportError
    else:
        import lamella.hub  # noqa: F401
    import torch
    import transformers
    from safetensors.torch import load_file

    given = load_file(batch)
    expected = given.pop("expected")
    config = transformers.AutoConfig.from_pretrained(directory)
    model_class = getattr(transformers, (config.architectures or [""])[0])
    model, info = model_class.from_pretrained(directory, dtype=expected.dtype, output_loading_info=True)
    with torch.no_grad():
        output = model(**given)
    found = output.logits if hasattr(output, "logits") else output[0]
    report = {
        "largest_difference": (found - expected).abs().max().item()
        if bool(torch.isfinite(found).all())
        else None,
        "wrong_keys": sorted(str(key) for what in info.values() if not isinstance(what, str) for key in what),
        "tokenizer_agrees": True,
    }
    if text is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        report["tokenizer_agrees"] = tokenizer(text)["input_ids"] == json.loads(ids)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
