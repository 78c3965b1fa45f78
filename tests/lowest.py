"""The lowest versions that pyproject.toml allows, tried out (`make lowest`).

python -m tests.lowest --pins     constraints that pin every direct dependency to its lower bound
python -m tests.lowest            import every module, then train, resume and sample a tiny model with them
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("dash",)
OTHER_EXTRAS = ("lm_eval", "ray", "wandb", "tensorboard", "huggingface_hub")
TINY = """training.dataset=my.txt data.tokenizer=train:300 model.depth=1 model.width=32 model.head_dim=16
    architecture.block_size=32 training.batch_size=8 training.validation_steps=8 logging.progress=none"""


def lower_bounds() -> dict[str, str]:
    """Package → the lowest version allowed, of the dependencies and of the extras that a user has by `make train`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = [*project["dependencies"], *(w for e in EXTRAS for w in project["optional-dependencies"][e])]
    found = {}
    for word in words:
        match = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:,<[\d.]+)?", word)
        assert match, f"{word}: a dependency has a lower bound"
        found[match[1]] = match[2]
    return found


def import_everything() -> int:
    import bessemer

    names = [module.name for module in pkgutil.walk_packages(bessemer.__path__, "bessemer.")]
    for name in names:
        if not name.endswith("__main__"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if (error.name or "").split(".")[0] not in OTHER_EXTRAS:
                    raise
    return len(names)


def use(folder: Path) -> None:
    """Train, resume and sample, as real processes."""
    words = "the red fox runs over the hill and the blue dog sleeps near the river . "
    (folder / "my.txt").write_text("".join(f"{words * 4}\n\n" for _ in range(60)), encoding="utf-8")
    train = f"train quickstart {TINY} training.steps=4 training.time_limit=1s --name low"
    for command in (train, "resume low training.time_limit=1h", "sample low --prompt the --max-tokens 4"):
        print(f"bessemer {' '.join(command.split())}", flush=True)
        result = subprocess.run([sys.executable, "-m", "bessemer", *command.split()], cwd=folder)
        assert result.returncode in (0, 75), result.returncode


def main() -> None:
    if "--pins" in sys.argv:
        print("\n".join(f"{name}=={version}" for name, version in lower_bounds().items()))
        return
    for name, bound in lower_bounds().items():
        installed = importlib.metadata.version(name)
        wanted = [int(part) for part in bound.split(".")]
        assert [int(p) for p in re.findall(r"\d+", installed)][: len(wanted)] == wanted, f"{name} {installed}"
    print(f"{import_everything()} modules imported with the lowest versions", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        use(Path(folder))


if __name__ == "__main__":
    main()
