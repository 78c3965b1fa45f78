"""Plans: what a recipe derives and what it will take, before anything is trained."""

from bessemer.plan.build import make_plan
from bessemer.plan.show import check_picture, render, sample_curves, write_curves

__all__ = ["check_picture", "make_plan", "render", "sample_curves", "write_curves"]
