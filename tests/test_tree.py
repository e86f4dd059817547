"""Structs as pytrees under optree and torch, and donation: a value that was consumed cannot be read."""

import dataclasses
import pickle

import optree
import pytest
import torch
from each_case import each
from torch.utils import _pytree as torch_pytree

from rft_fn import tree


@tree.struct
class Inner:
    x: torch.Tensor  # [2]
    y: torch.Tensor | None = None


@tree.struct
class Outer:
    inner: Inner
    named: tree.Named
    tag: str = tree.static(default="a")


def outer():
    return Outer(
        inner=Inner(x=torch.tensor([1.0, 2.0])),
        named=tree.Named(b=torch.tensor([3.0]), a=torch.tensor([4.0])),
        tag="t",
    )


def test_leaves_come_in_the_order_of_fields_and_of_names():
    assert [x.tolist() for x in tree.leaves(outer())] == [[1.0, 2.0], [3.0], [4.0]]
    assert [path for path, _ in tree.leaves_with_path(outer())] == ["inner/x", "named/b", "named/a"]


@pytest.mark.parametrize("walk", [tree.map, torch_pytree.tree_map], ids=["optree", "torch"])
def test_map_keeps_none_static_fields_and_types(walk):
    """None is an absent field under both traversals: torch alone would hand it to the function as a leaf."""
    out = walk(lambda x: x + 1, outer())
    assert type(out) is Outer and type(out.inner) is Inner and type(out.named) is tree.Named
    assert out.inner.x.tolist() == [2.0, 3.0] and out.inner.y is None and out.tag == "t"
    assert {k: v.tolist() for k, v in out.named.items()} == {"b": [4.0], "a": [5.0]}


def test_a_copy_shares_nothing_with_what_it_was_made_of():
    old = outer()
    old.inner.x.requires_grad_()
    old = tree.replace(old, inner=tree.replace(old.inner, y=(2 * old.inner.x)))
    new = tree.copy(old)
    assert type(new) is Outer and new.tag == "t" and type(new.named) is tree.Named
    assert not any(x.requires_grad for x in tree.leaves(new))
    for x in tree.leaves(old):
        x.detach().zero_()
    tree.donate(old)
    assert [x.tolist() for x in tree.leaves(new)] == [[1.0, 2.0], [2.0, 4.0], [3.0], [4.0]]
    assert tree.copy({"step": 3, "none": None, "f": (torch.ones(1),)})["step"] == 3


def test_both_traversals_see_the_same_leaves():
    ours, theirs = tree.leaves(outer()), torch_pytree.tree_leaves(outer())
    assert [x.tolist() for x in ours] == [x.tolist() for x in theirs]


def test_map_over_several_trees_wants_one_structure():
    total = tree.map(lambda a, b: a + b, outer(), outer())
    assert total.named["b"].item() == 6.0
    with pytest.raises(ValueError):
        tree.map(
            lambda a, b: a + b, outer(), tree.replace(outer(), inner=Inner(x=torch.ones(2), y=torch.ones(1)))
        )
    with pytest.raises(ValueError):
        tree.map(lambda a, b: a + b, outer(), tree.replace(outer(), tag="other"))


def test_unflatten_like_inverts_leaves():
    x = outer()
    again = tree.unflatten_like(x, [2 * leaf for leaf in tree.leaves(x)])
    assert again.inner.x.tolist() == [2.0, 4.0] and again.named["a"].item() == 8.0 and again.tag == "t"


def test_structs_go_through_torch_func():
    grads = torch.func.grad(lambda s: (s.inner.x**2).sum() + s.named["a"].sum())(outer())
    assert grads.inner.x.tolist() == [2.0, 4.0] and grads.named["a"].item() == 1.0
    assert grads.named["b"].item() == 0.0


def test_structs_pickle():
    again = pickle.loads(pickle.dumps(outer()))
    assert again.inner.x.tolist() == [1.0, 2.0] and again.tag == "t"


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda x: tree.replace(x, tagg="b"), TypeError, "tagg"),
        (lambda x: Outer(inner=x.inner), TypeError, "named"),
        (lambda x: Outer(x.inner, x.named), TypeError, "positional"),
        (lambda x: x.tagg, AttributeError, "Outer has no field 'tagg'"),
        (lambda x: setattr(x, "tag", "b"), dataclasses.FrozenInstanceError, "tag"),
    ],
)
def test_typos_and_writes_are_errors(act, error, message):
    with pytest.raises(error, match=message):
        act(outer())


def test_replace_leaves_the_original_alone():
    x = outer()
    assert tree.replace(x, tag="b").tag == "b" and x.tag == "t"


def test_a_donated_struct_names_itself_and_the_field():
    x = outer()
    inner, kept = x.inner, x.inner.x
    tree.donate(x)
    with pytest.raises(tree.UseAfterDonate, match=r"Outer\.named: .*donated"):
        _ = x.named
    with pytest.raises(tree.UseAfterDonate, match=r"Inner\.x: "):
        _ = inner.x
    assert kept.tolist() == [1.0, 2.0]  # the tensor itself lives on in whoever holds it


@pytest.mark.parametrize(
    "read",
    [
        tree.leaves,
        torch_pytree.tree_leaves,
        lambda x: list(tree.leaves_with_path(x)),
        lambda x: tree.map(lambda leaf: leaf, x),
        lambda x: optree.tree_leaves(x, namespace="rft_fn"),
        repr,
        lambda x: tree.replace(x, tag="b"),
    ],
)
def test_no_walk_gets_past_donation(read):
    x = outer()
    tree.donate(x)
    with pytest.raises(tree.UseAfterDonate):
        read(x)


@each(
    "read",
    [
        lambda n: n["a"],
        list,
        len,
        lambda n: "a" in n,
        lambda n: n.items(),
        lambda n: n.values(),
        lambda n: n.keys(),
        lambda n: n.get("a"),
        lambda n: dict(n),
        lambda n: {**n},
        tree.leaves,
        torch_pytree.tree_leaves,
        lambda n: tree.map(lambda x: x, {"params": n}),
    ],
)
def test_donated_names_cannot_be_read_in_any_way(read):
    named = tree.Named(a=torch.ones(1))
    tree.donate([{"inside": named}])
    with pytest.raises(tree.UseAfterDonate, match="donated"):
        read(named)


def test_donating_twice_is_harmless_and_others_are_untouched():
    x, other = outer(), outer()
    tree.donate(x)
    tree.donate(x)
    assert other.inner.x.tolist() == [1.0, 2.0]
