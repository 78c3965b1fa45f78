"""Plans: what a recipe derives and what it will take, before anything is trained."""

from bessemer.plan.build import make_plan
from bessemer.plan.curves import check_picture, sample_curves, write_curves
from bessemer.plan.show import render

__all__ = ["check_picture", "make_plan", "render", "sample_curves", "write_curves"]
