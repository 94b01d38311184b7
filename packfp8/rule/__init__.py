"""The rule: what must divide what, and why. Plain integers; neither numpy nor torch is loaded here."""

from packfp8.rule.alignment import Alignment, align, checked_rule
from packfp8.rule.need import Need
from packfp8.rule.recipe import RECIPES, Recipe
from packfp8.rule.topology import Topology

__all__ = ["RECIPES", "Alignment", "Need", "Recipe", "Topology", "align", "checked_rule"]
