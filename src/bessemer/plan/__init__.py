"""Plans: what a recipe derives and what it will take, before anything is trained."""

from bessemer.plan.document import check_picture, make_plan, render, sample_curves, write_curves

__all__ = ["check_picture", "make_plan", "render", "sample_curves", "write_curves"]
