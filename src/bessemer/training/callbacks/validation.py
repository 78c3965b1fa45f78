"""Shows each validation result as it comes."""

from __future__ import annotations

from typing import Any

from bessemer.registry import callbacks
from bessemer.report.table import with_error
from bessemer.training.callback import Callback
from bessemer.training.loop import Loop


@callbacks.register("validation")
class Validation(Callback):
    """One line a validation: loss or reward, bits per byte where they are known, how many pairs are ranked right, and
    whether it is the best."""

    def on_validation(self, loop: Loop, row: dict[str, Any]) -> None:
        name = "val_loss" if "val_loss" in row else "val_reward"
        line = f"step {row['step']:>6}  {name.replace('_', ' ')} {row[name]:.4f}"
        if "val_loss" in row and "val_reward" in row:
            line += f"  reward {row['val_reward']:.4f}"
        if row.get("val_bpb") is not None:
            line += f"  bits/byte {with_error(row['val_bpb'], row.get('val_bpb_se'))}"
        if "val_pref_acc" in row:
            line += f"  right {row['val_pref_acc']:.1%}  margin {row['val_margin']:.3f}"
        best = loop.loop_state.best_step == row["step"] and row["step"] > 0
        loop.trainer.say(line + ("  (best)" if best else ""))
