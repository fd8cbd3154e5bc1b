"""Nothing of ours opens a socket, and a missing transformers is explained."""

import os
import subprocess
import sys
from pathlib import Path

# Python runs it at its start, also in the fresh process that checks an export.
SITE = """
import socket

def refused(*args, **kwargs):
    with open({log!r}, "a") as log:
        log.write(f"{{args}}\\n")
    raise AssertionError(f"a socket was opened: {{args}}")

for owner, name in (
    (socket.socket, "connect"),
    (socket.socket, "connect_ex"),
    (socket.socket, "sendto"),
    (socket, "create_connection"),
    (socket, "getaddrinfo"),
):
    setattr(owner, name, refused)
with open({started!r}, "a") as started:
    started.write("x")
"""

WORK = """
import os, socket
from pathlib import Path
assert "HF_HUB_OFFLINE" not in os.environ
assert socket.create_connection is socket.socket.connect  # both are what refuses
from lamella import BTT, replace_
from lamella.data import make_tokenizer
from lamella.hub import build_model, export, ffn_rules, load_config, load_model
from lamella.train.evaluate import evaluate, evaluate_path
model = build_model(load_config("tiny", hidden_size=32, intermediate_size=64, num_hidden_layers=2))
replace_(model, ffn_rules(model, BTT(rho=2)))
model.save_pretrained("saved")
loaded = load_model("saved")
tokenizer = make_tokenizer("char")
text = "To be, or not to be."
Path("text.txt").write_text(text)
print(evaluate(loaded, text, context=16, tokenizer=tokenizer).tokens)
for structured in (True, False):
    export(loaded, tokenizer, f"exported-{structured}", structured=structured)
    load_model(f"exported-{structured}")
    print(evaluate_path(f"exported-{structured}", "text.txt").tokens)
"""


def test_saving_loading_export_and_evaluation_open_no_socket(tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    log, started = tmp_path / "sockets", tmp_path / "started"
    (site / "sitecustomize.py").write_text(SITE.format(log=str(log), started=str(started)))
    online = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    done = subprocess.run(
        [sys.executable, "-c", WORK],
        capture_output=True,
        text=True,
        cwd=work,
        env=online | {"PYTHONPATH": str(site)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["19", "19", "19"]
    assert not log.exists(), log.read_text()
    assert started.read_text() == "xxx"  # this process, and one that checks each export


def test_without_transformers_the_import_says_what_to_install() -> None:
    code = 'import sys; sys.modules["transformers"] = None; import lamella; import lamella.hub'
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: lamella.hub needs transformers: pip install 'lamella[lm]'"
