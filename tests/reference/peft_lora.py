"""Adapters over tiny models, run by PEFT. Makes peft_lora.json; run with torch, transformers and peft:

    python -m tests.reference.peft_lora

Adapters are drawn from their names, like the weights of huggingface.py, so none is stored. Of each gradient its norm
and four products with vectors of ±1 are kept. Dropout is off; in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.reference.huggingface import CASES, build, drawn, sketch, some_ids

OUT = Path(__file__).with_suffix(".json")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("qwen3", {"r": 4, "lora_alpha": 6, "target_modules": ALL}),
    "dora": ("llama3", {"r": 3, "lora_alpha": 6, "target_modules": ALL, "use_dora": True}),
    "patterns": (
        "qwen2",
        {
            "r": 4,
            "lora_alpha": 6,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2, "model.layers.1.mlp.down_proj": 6},
            "alpha_pattern": {"layers.0.self_attn.v_proj": 9, "down_proj": 3},
        },
    ),
}
"""Name → (the base, of huggingface.py; PEFT's settings)."""


def adapter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The adapter called `name` (as saved), large enough to count; the lengths of DoRA are near 1.5."""
    values = drawn(name.replace("norm", ""), shape)
    return values + 1.2 if "magnitude" in name else values


def saved_name(name: str) -> str:
    """The name of a parameter in adapter_model.safetensors."""
    return name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def adapted(name: str) -> Any:
    """PEFT's model of a case, with the drawn adapters."""
    import peft
    import torch

    base, settings = ADAPTERS[name]
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(build(CASES[base]), config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.from_numpy(adapter(saved_name(key), tuple(parameter.shape))))
    return model


def answers(model: Any) -> dict[str, Any]:
    import torch

    ids = torch.from_numpy(some_ids(67))
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    trained = {saved_name(key): p for key, p in model.named_parameters() if p.requires_grad}
    return {
        "ids": ids.tolist(),
        "loss": float(output.loss.detach()),
        "logits": [[float(f"{x:.7g}") for x in row] for row in output.logits[0].detach().numpy()],
        "shapes": {key: list(p.shape) for key, p in trained.items()},
        "gradients": {key: [float(f"{x:.8g}") for x in sketch(key, p.grad.numpy())] for key, p in trained.items()},
    }


def main() -> None:
    import peft
    import torch

    stored: dict[str, Any] = {"made_by": f"peft {peft.__version__}, torch {torch.__version__}"}
    for name in ADAPTERS:
        model = adapted(name)
        config = model.peft_config["default"].to_dict()
        config["target_modules"] = sorted(config["target_modules"])
        stored[name] = {"config": {k: getattr(v, "value", v) for k, v in config.items()}, **answers(model)}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in stored.items())
    OUT.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
