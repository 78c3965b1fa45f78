"""The commands that README.md and docs/*.md show, made short enough to be run."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.data.stock_templates import FAMILIES
from tests.processes import TIMEOUT

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *(page for place in ("docs", "docs/reference") for page in sorted((ROOT / place).glob("*.md"))),
]

# What makes a documented `bessemer train` quick. Sizes replace what the page says; the rest is added where the page
# says nothing.
SIZES = {
    "training.steps": "4",
    "model.depth": "1",
    "model.width": "32",
    "model.head_dim": "16",
    "architecture.block_size": "32",
    "training.batch_size": "8",
    "training.per_device_batch_size": "-1",
}
QUICK = {
    "training.dataset": "my.txt",
    "data.tokenizer": "train:300",
    "training.validation_steps": "8",
    "logging.progress": "none",
    "logging.report_interval": "1",
    "logging.checkpoint_interval": "2",
    "logging.preview_interval": "0",
    "logging.plots": "false",
}
HORIZONS = ("training.tokens", "training.flops", "training.epochs", "training.ratio")
OF_GPT = ("model.depth", "model.head_dim")
OTHER_MODEL = ("model.family=", "job=")
WORDS = [
    "the",
    "a",
    "red",
    "blue",
    "fox",
    "dog",
    "cat",
    "runs",
    "jumps",
    "sleeps",
    "over",
    "under",
    "near",
    "river",
    "hill",
    "tree",
    "and",
    "then",
]


# Shown but not run here, with the reason. An entry that no page shows any more is an error.
NOT_RUN = {
    r"bessemer eval .* harness:.*": "needs the extra `eval`: tests/evaluate/test_evaluate_harness.py",
    r"bessemer train .* init=hf:.*": "needs the network: tests/interop/test_interop_hub_adapters.py",
    r"bessemer train .* training\.dataset=fineweb-edu.*": "needs the network: tests/data/test_data_hub.py",
    r"bessemer (resume|sample) adapted --base .*": "needs a base that moved: tests/training/test_frozen_base.py",
    r"bessemer (chat|export) runs/smol.*": "needs the line before it: tests/interop/test_interop_hub_adapters.py",
    r"bessemer (import|train sft) .*models/peft-poems.*": "needs adapters of PEFT: tests/interop/test_peft.py",
    r"bessemer export more-poems .*": "needs the line before it: tests/interop/test_peft.py",
    r"bessemer serve smol --adapter .*": "needs adapters of one base: tests/serve/test_serve_adapters.py",
    r"bessemer launch local (?!.*--processes ).*": "needs GPUs: tests/launch/test_launch_local.py has fake ones",
    r"bessemer train .* topology\.pipeline=4 .*": "needs eight devices: tests/mesh/test_pipeline.py",
    r"bessemer train … topology\.coordinator=.*": "two processes at once: tests/training/test_training_processes.py",
    r"bessemer (train|resume) (demo|runs/road).*": "minutes, and killed: tests/training/test_training_phases.py",
    r"bessemer train (sft|dpo|reward|grpo|grpo-tools|grpo-multiturn|finetune-q?lora) --name \w+": "make prove",
    r"bessemer (train speedrun-gpu|resume runs/problems).*": "needs a GPU and data: test_training_phases.py",
    r"bessemer train gpt2 .*": "hours of GPUs and the network: tests/training/test_recipe_gpt2.py",
    r"bessemer train distill .*": "trains a teacher too: tests/training/test_training_distill.py",
    r"bessemer train distill-online .*": "with a teacher and a student before it: make prove; test_on_policy.py",
    r"bessemer plan .*--topology (\d+x)?v\w+:[\dx]+( --quick)?": "needs libtpu: tests/plan/test_plan_topology.py",
    r"bessemer data prepare .* --engine ray": "needs the extra `ray`: tests/data/test_data_ray.py",
    r"bessemer (train|resume) .*s3://bucket/.*": "needs a bucket: tests/training/test_mirror.py",
    r"bessemer serve .*": "it serves until it is stopped: tests/serve/test_serve_process.py",
    r"bessemer train .* logging\.(wandb|tensorboard)=true.*": "needs the extra `track`: test_trackers.py",
    r"bessemer dash.*": "it serves until it is stopped: tests/dash/test_dash_command.py",
}
RUN_ELSEWHERE = {"extending.md": "tests/test_extending.py"}
# Half a minute and more, even when shortened: `make long`.
MINUTES = {"tutorial.md", "planning.md", "grpo.md", "lora.md", "huggingface.md", "models.md"}
MINUTES |= {"scale.md", "topology.md", "continual.md", "evaluation.md"}


def blocks(page: Path, *languages: str) -> list[str]:
    """Contents of the fenced blocks in one of the languages ("" is a fence without a word)."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    return [text for language, text in found if language.strip() in languages]


def commands(page: Path) -> list[str]:
    """Lines of shell blocks that call our tools, without prompt and comment."""
    lines = [line for text in blocks(page, "bash", "console", "sh", "") for line in text.splitlines()]
    lines = [re.sub(r"\s+#.*", "", line.strip().removeprefix("$ ")) for line in lines]
    return [line for line in lines if re.match(r"(bessemer|python|make|cmp)( |$)", line)]


def reason_not_run(command: str) -> str | None:
    return next((reason for form, reason in NOT_RUN.items() if re.fullmatch(form, command)), None)


def not_run() -> list[tuple[str, str, str]]:
    """(page, command, reason) of every documented command that the tests of CI do not run as it is shown."""
    found = []
    for page in PAGES:
        for command in commands(page):
            word = command.split()[0]
            if word in ("make", "python"):
                reason = "only checked to exist"
            elif page.name in RUN_ELSEWHERE:
                reason = f"run by {RUN_ELSEWHERE[page.name]}"
            elif page.name in MINUTES:
                reason = "takes minutes: make long"
            else:
                reason = reason_not_run(command) or ""
            if reason:
                found.append((page.name, command, reason))
    return found


def starts_a_run(command: str) -> bool:
    return command.startswith("bessemer train") or (
        command.startswith("bessemer launch local") and " --resume " not in command
    )


def shorten(command: str) -> str:
    """The command as it is run here: only commands that start a run are changed, by the tables above."""
    if not starts_a_run(command):
        return command
    words = command.split(" ")
    given = {word.partition("=")[0] for word in words if "=" in word}
    other = any(word.startswith(OTHER_MODEL) for word in words)
    sizes = {key: value for key, value in SIZES.items() if not (other and key in OF_GPT and key not in given)}
    if "architecture.lookup.after_layers" in given:  # after the first of two
        sizes["model.depth"] = "2"
    quick = {key: value for key, value in QUICK.items() if key not in given}
    if "init" in given:  # sizes and tokenizer are those of the weights it starts from
        sizes = {key: value for key, value in sizes.items() if not key.startswith("model.")}
        quick.pop("data.tokenizer", None)
    kept = [word for word in words if word.partition("=")[0] not in (*sizes, *HORIZONS)]
    # One size of vocabulary on all pages: what one command has compiled the next one finds.
    kept = [re.sub(r"^data\.tokenizer=train:\d+$", f"data.tokenizer={QUICK['data.tokenizer']}", word) for word in kept]
    added = sizes | quick
    return " ".join([*kept, *(f"{key}={shlex.quote(value)}" for key, value in added.items())])


def make_files(folder: Path) -> None:
    """The files that the pages speak of: my.txt, texts/ in two formats, conversations, pairs, small tasks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(200)) + ".\n" for _ in range(60)]
    (folder / "my.txt").write_text("".join(texts))
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("".join(texts[:20]))
    pq.write_table(pa.table({"text": texts}), folder / "texts" / "b.parquet")
    asked = [{"instruction": f"Say {word}.", "output": f"The {word}."} for word in WORDS * 4]
    write_lines(folder / "chats.jsonl", asked)
    pairs = [{"prompt": a, "chosen": b, "rejected": a} for a, b in itertools.pairwise(WORDS)]
    write_lines(folder / "pairs.jsonl", pairs * 4)
    make_tasks(folder)
    make_prompts(folder)
    (folder / "my_env.py").write_text(blocks(ROOT / "docs" / "grpo.md", "python")[0])
    make_agents(folder)
    make_config(folder / "models" / "Llama-3.1-8B")


def make_agents(folder: Path) -> None:
    """A tokenizer with Qwen3's template, and agents.jsonl, whose conversations have tools and reasoning."""
    family = next(family for family in FAMILIES if family.name == "qwen3")
    (folder / "qwen3").mkdir()
    (folder / "qwen3" / "tokenizer.json").write_text(family.tokenizer.to_json())
    config = {**family.tokens, "chat_template": family.source}
    (folder / "qwen3" / "tokenizer_config.json").write_text(json.dumps(config))
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    rows: list[dict[str, object]] = []
    for city in WORDS:
        call = {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
        messages = [
            {"role": "user", "content": f"Is it sunny in {city}?"},
            {"role": "assistant", "content": "", "reasoning_content": "Ask the function.", "tool_calls": [call]},
            {"role": "tool", "content": "clear", "name": "weather"},
            {"role": "assistant", "content": "It is."},
            {"role": "user", "content": "And tomorrow?"},
            {"role": "assistant", "content": "I cannot tell."},
        ]
        rows.append({"messages": messages, "tools": [{"type": "function", "function": function}]})
    write_lines(folder / "agents.jsonl", rows)


def make_config(folder: Path) -> None:
    """The configuration of a small model as a published one comes, without weights: for plans."""
    folder.mkdir(parents=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5, **sizes, **more}))


def make_prompts(folder: Path) -> None:
    """prompts.jsonl, gsm8k_train.jsonl, and completions.jsonl with groups of four."""
    sums = [(a, b) for a in range(1, 9) for b in range(1, 9)]
    write_lines(folder / "prompts.jsonl", [{"prompt": f"Add {a} and {b}", "answer": str(a + b)} for a, b in sums])
    asked = [
        {"question": f"{a} + {b}?", "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"} for a, b in sums
    ]
    write_lines(folder / "gsm8k_train.jsonl", asked)
    said = [{"prompt": f"Add {a} and {b}", "completions": [str(a + b), "1", "2", "30"]} for a, b in sums]
    write_lines(folder / "completions.jsonl", [{**row, "rewards": [1, 0, 0, 0]} for row in said])


def make_tasks(folder: Path) -> None:
    """pets.jsonl with its header, gsm8k_test.jsonl, and a bundle of one task."""
    pets = {"query": "A kitten grows up to be a", "choices": ["cat", "dog"], "gold": 0}
    header = {"task": "pets", "kind": "multiple_choice", "fewshot": 1, "random_baseline": 0.5}
    write_lines(folder / "pets.jsonl", [header, pets, pets])
    write_lines(folder / "gsm8k_test.jsonl", [{"question": "What is 2 + 3?", "answer": "#### 5"}])
    (folder / "bundle").mkdir()
    write_lines(folder / "bundle" / "pets.jsonl", [pets, pets])
    (folder / "bundle" / "tasks.json").write_text(json.dumps({"tasks": [{**header, "file": "pets.jsonl"}]}))


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(command: str, folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """A command in a shell, as a reader would type it, with this environment's programs first."""
    programs = str(Path(sys.executable).parent)
    variables = os.environ | {
        "PATH": programs + os.pathsep + os.environ["PATH"],
        "BESSEMER_HOME": str(home),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "MPLBACKEND": "Agg",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # a third of a command is compiling; nothing is timed here
    }
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


class Pages:
    """Runs the commands of pages, each page in a folder of its own. A start that pages have in common (`bessemer train
    quickstart --name` whatever) is trained once; the others get its run directory under their name."""

    def __init__(self, kept: Path, home: Path) -> None:
        self.kept, self.home = kept, home
        self.trained: dict[str, Path] = {}

    def run(self, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        words, name = without_name(shorten(command))
        shared = name is not None and of_the_folder_as_made(words)
        if shared and words in self.trained:
            shutil.copytree(self.trained[words], folder / "runs" / name)
            return subprocess.CompletedProcess(command, 0, "", "")
        result = run(shorten(command), folder, self.home)
        if shared and result.returncode == 0:
            self.trained[words] = self.kept / str(len(self.trained))
            shutil.copytree(folder / "runs" / name, self.trained[words])
        return result


def without_name(command: str) -> tuple[str, str | None]:
    """A command without its `--name NAME`, and the name."""
    found = re.search(r" --name (\S+)", command)
    return (command, None) if found is None else (command.replace(found[0], ""), found[1])


def of_the_folder_as_made(command: str) -> bool:
    """Whether a training rests on nothing that commands before it have made."""
    made = r"bessemer train (?=.*\btraining\.dataset=my\.txt\b)(?!.*(\binit=|\bdistill\.teacher=|\btime_limit=))"
    return re.match(made, command) is not None


def said(result: subprocess.CompletedProcess[str]) -> str:
    return f"$ {result.args[-1]}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
