"""One function per verb of the command line; each imports what it needs when it runs, prints, and returns its JSON."""

from typing import Any, Literal

Document = dict[str, Any]


def info(
    model: str = "tiny",
    structure: str | None = None,
    all_blocks: bool = False,
    context: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> Document:
    """Parameters, FLOPs and bytes of a model, from the meta device.

    Args:
        model: preset (tiny, small, s, m, l, xl), Hugging Face model directory, or config.json
        structure: structure of the FFN layers of all blocks but the first, e.g. "LowRank(rank=192)"
        all_blocks: give the first block's FFN the structure too
        context: tokens per sequence; the model's own by default
        dtype: of the weights
    """
    import torch

    from lamella.hub import account, build_model, ffn_rules, format_account, load_config
    from lamella.nn import replace_
    from lamella.structures import parse_structure

    if all_blocks and structure is None:
        raise ValueError("all_blocks has no effect without a structure")
    config = load_config(model)
    built = build_model(config, device="meta", dtype=getattr(torch, dtype))
    if structure is not None:
        replace_(built, ffn_rules(built, parse_structure(structure), all_blocks))
    result = account(built, context)
    print(format_account(result))
    return {"model": model, "structure": structure, **result.to_json()}


def prepare(
    files: list[str],
    out: str,
    tokenizer: str = "bpe-4096",
    validation_files: list[str] = [],  # noqa: B006
    test_files: list[str] = [],  # noqa: B006
    validation_frac: float | None = None,
    test_frac: float | None = None,
    overwrite: bool = False,
) -> Document:
    """Turn text files (.txt, .xz, .gz) into a folder of memory-mapped token files.

    Args:
        files: text files, UTF-8
        out: folder to write
        tokenizer: char (96 characters), byte, or bpe-N, trained on the text
        validation_files: text for validation; else the end of the text
        test_files: text for the test split; else the part before that
        validation_frac: fraction of the text kept for validation, by default 0.01
        test_frac: fraction kept for the test, by default 0.01
        overwrite: replace a finished dataset at `out`
    """
    from lamella.data import prepare
    from lamella.progress import counted

    with counted("preparing", "bytes") as progress:
        summary = prepare(
            files,
            out,
            tokenizer=tokenizer,
            validation_files=validation_files,
            test_files=test_files,
            validation_frac=validation_frac,
            test_frac=test_frac,
            overwrite=overwrite,
            progress=progress,
        )
    for split, facts in summary["splits"].items():
        print(f"{split:>10}: {facts['tokens']:,} tokens from {facts['bytes']:,} bytes")
    print(f"wrote {out}; train on it with: lamella train --data {out}")
    return summary


def evaluate(run: str, text: str, limit_tokens: int | None = None, batch_size: int = 32) -> Document:
    """Bits per byte and perplexity of a run, checkpoint or exported directory on a text or token file.

    Args:
        run: run folder, checkpoint folder or exported directory
        text: text file (.txt, .xz, .gz) or prepared token file
        limit_tokens: score only the first so many tokens
        batch_size: windows at a time
    """
    from lamella.progress import counted
    from lamella.train import evaluate_path

    with counted("evaluating", "tokens") as progress:
        result = evaluate_path(run, text, limit_tokens=limit_tokens, batch_size=batch_size, progress=progress)
    print(f"{result.bpb:.4f} bits per byte, perplexity {result.perplexity:.2f} on {result.tokens:,} tokens")
    if result.bpb_structured is not None:
        print(f"{result.bpb_structured:.4f} bits per byte of the structured layers alone, without the guide")
    if result.replaced_characters:
        print(f"{result.replaced_characters:,} characters are not in the vocabulary and were replaced")
    return result.to_json()


def generate(
    run: str,
    prompt: str = "\n",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Document:
    """Continue a prompt, streamed as it is drawn.

    Args:
        run: run folder, checkpoint folder or exported directory
        prompt: text to continue
        max_new_tokens: tokens to draw
        temperature: 0 takes the likeliest token
        top_p: draw from the smallest set of tokens with this probability
        seed: of the draws
    """
    from lamella.train import generate

    print(prompt, end="", flush=True)
    text = generate(
        run,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stream=lambda piece: print(piece, end="", flush=True),
    )
    print()
    return {"prompt": prompt, "text": text}


def export(run: str, out: str, structured: bool = False, tolerance: float | None = None) -> Document:
    """Write a run as a Hugging Face directory, verified from a fresh process.

    Args:
        run: run folder or checkpoint folder
        out: directory to write; must not exist
        structured: keep the factors; loading then needs lamella
        tolerance: largest logit difference accepted; by default 1e-3, more for 16-bit weights
    """
    from lamella.train import export_run

    report = export_run(run, out, structured=structured, tolerance=tolerance)
    print(f"wrote {out}; largest logit difference {report['max_logit_difference']:.3g} in a fresh process")
    return report


def bench(
    width: int = 768,
    tokens: int = 2048,
    dtype: Literal["float32", "bfloat16"] = "float32",
    backward: bool = False,
    structures: list[str] = [  # noqa: B006
        "LowRank(rank_frac=0.25)",
        "BlockDense(num_blocks=4, rank_frac=0.25)",
        "BlockShuffle(num_blocks=4)",
        "BTT(gamma=16, phi=16, rho=8)",
        "Kronecker()",
        "TensorTrain(rho=8)",
    ],
    rounds: int = 9,
) -> Document:
    """Time structured layers against nn.Linear here, interleaved, as ratios.

    Args:
        width: d; layers d -> 4d and 4d -> d are timed
        tokens: per call
        dtype: of weights and input
        backward: time forward and backward
        structures: structures to time
        rounds: medians are over so many rounds
    """
    import torch

    from lamella.bench import machine, time_layers, to_rows
    from lamella.structures import parse_structure

    for name, value in (("width", width), ("tokens", tokens), ("rounds", rounds - 1)):
        if value < 1:
            raise ValueError(f"{name} must be {'at least 2' if name == 'rounds' else 'a positive integer'}")
    timings = time_layers(
        [parse_structure(s) for s in structures],
        [(width, 4 * width), (4 * width, width)],
        tokens=tokens,
        dtype=getattr(torch, dtype),
        backward=backward,
        rounds=rounds,
    )
    what = "forward and backward" if backward else "forward"
    about = machine()
    print(
        f"{what}, {tokens} tokens, {dtype}, {about['threads']} threads, {about['cpu']}, torch {about['torch']}"
    )
    print("| structure | shape | parameters | multiply-adds | speed-up | eff | spread |")
    print("|---|---|---|---|---|---|---|")
    for t in timings:
        print(
            f"| {t.structure} | {t.in_features} -> {t.out_features} | {t.params_frac:.1%} "
            f"| {t.multiply_adds_frac:.1%} | {t.speed_up:.2f}x{'' if t.faster else ' (slower here)'} "
            f"| {t.eff:.2f} | {t.spread:.0%} |"
        )
    for text in structures:
        if not any(t.structure == repr(parse_structure(text)) for t in timings):
            print(f"{text} fits neither {width} -> {4 * width} nor {4 * width} -> {width}: not timed")
    print(
        "eff: speed-up / (dense multiply-adds / structured). spread: between the quartiles of the speed-up."
    )
    return {"machine": about, "timings": to_rows(timings)}
