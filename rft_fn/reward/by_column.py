"""Rewards by a column of the data: each kind of row has its own rewards and weights."""

from collections.abc import Mapping
from typing import Any

from rft_fn.reward.combine import Weighted
from rft_fn.reward.loading import parse
from rft_fn.reward.row_weights import RowWeights

__all__ = ["by_column"]


def by_column(column: str, recipes: Mapping[str, Weighted | Mapping[str, float]]) -> Weighted:
    """One score of several: a row is scored by the recipe for its value in `column`.

    A recipe is a `Weighted`, or weights by the specs of `load`:

        by_column("label", {"gsm8k": {"numeric": 0.9, "format": 0.1}, "chat": weighted(length=(length, 1.0))})

    A reward that several recipes share is called once, for the rows of all of them. A row with another value
    has no reward, and is an error when it is scored. ValueError for no recipe, for two rewards with one name,
    and for a recipe with vetoes or weights by a column of its own.
    """
    if not recipes:
        raise ValueError("by_column: expected at least one recipe, got none")
    components: dict[str, tuple[Any, RowWeights]] = {}
    loaded: dict[str, Weighted] = {}
    specs: dict[str, str] = {}
    for value, recipe in recipes.items():
        for name, fn, weight, spec in _parts(column, str(value), recipe, loaded):
            if name in components and components[name][0] is not fn:
                raise ValueError(
                    f"by_column: expected rewards with names that differ, got two that are called {name!r}"
                )
            own = RowWeights(column, {str(value): weight})
            if name in components:
                own = components[name][1].joined(own)
            components[name] = (fn, own)
            specs[name] = spec
    return Weighted(components, specs=specs)


def _parts(
    column: str, value: str, recipe: Weighted | Mapping[str, float], loaded: dict[str, Weighted]
) -> list[tuple[str, Any, float, str]]:
    """(name, reward, weight, spec) of each part of a recipe; each spec is loaded once."""
    found = []
    if isinstance(recipe, Weighted):
        if recipe.vetoes:
            raise ValueError(f"by_column: {column} {value!r}: expected vetoes of the whole, got its own")
        for name, (fn, weight) in recipe.components.items():
            if isinstance(weight, RowWeights):
                raise ValueError(f"by_column: {column} {value!r}: expected numbers as weights, got {weight}")
            found.append((name, fn, weight, recipe.specs.get(name, name)))
        return found
    for spec, weight in recipe.items():
        if spec not in loaded:
            loaded[spec] = parse([spec])
        for name, (fn, _) in loaded[spec].components.items():
            found.append((name, fn, weight, spec))
    return found
