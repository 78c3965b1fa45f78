"""Says when clipping, which happens inside the compiled step, is the rule rather than the exception."""

from __future__ import annotations

from typing import Any

from bessemer.registry import callbacks
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop

OFTEN = 0.9
SETTLED = 200


@callbacks.register("gradient_clipping")
class GradientClipping(Callback):
    """Every row carries grad_norm and clip_share; one line warns when nearly all of many steps were clipped."""

    warned = False

    def on_metrics(self, loop: Loop, row: dict[str, Any]) -> None:
        if not self.warned and row["step"] >= SETTLED and row["clip_share"] > OFTEN:
            self.warned = True
            limit = loop.trainer.settings.max_grad_norm
            loop.trainer.say(
                f"note: {row['clip_share']:.0%} of the steps so far were clipped at training.max_grad_norm={limit:g}; "
                "the effective rate is lower than optimization.lr says"
            )
