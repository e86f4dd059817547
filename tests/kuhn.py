"""Kuhn poker as a tree: what strategies win, and what the best response wins from them."""

from collections.abc import Callable, Iterator
from itertools import permutations, product

from rft_fn.environment import Renderer
from rft_fn.environment.kuhn import Hand
from rft_fn.environment.record import as_messages

CARDS = "jqk"
Strategy = Callable[[str, str], float]
"""(card, actions so far) -> the probability to bet or call."""


def hands() -> Iterator[Hand]:
    """The six deals, each as likely."""
    return (Hand("".join(cards)) for cards in permutations(CARDS, 2))


def expected_payoff(first: Strategy, second: Strategy) -> float:
    """The chips per hand that `first` wins in seat 0 against `second`, over all deals and actions."""
    return sum(_value(hand, (first, second)) for hand in hands()) / 6


def _value(hand: Hand, players: tuple[Strategy, Strategy]) -> float:
    if hand.payoff is not None:
        return float(hand.payoff)
    bet = players[hand.seat](hand.cards[hand.seat], hand.actions)
    values = [_value(hand._replace(actions=hand.actions + action), players) for action in "01"]
    return (1 - bet) * values[0] + bet * values[1]


_BETS = {
    ("j", ""): 1 / 3, ("q", ""): 0.0, ("k", ""): 1.0,
    ("j", "01"): 0.0, ("q", "01"): 2 / 3, ("k", "01"): 1.0,
    ("j", "0"): 1 / 3, ("q", "0"): 0.0, ("k", "0"): 1.0,
    ("j", "1"): 0.0, ("q", "1"): 1 / 3, ("k", "1"): 1.0,
}  # fmt: skip


def nash(card: str, actions: str, /) -> float:
    """One of the equilibria of Kuhn poker, as a `Strategy` for both seats."""
    return _BETS[card, actions]


# ---------- how well a strategy plays


_DECISIONS = ([(c, a) for c in CARDS for a in ("", "01")], [(c, a) for c in CARDS for a in ("0", "1")])


def best_payoff(opponent: Strategy, seat: int) -> float:
    """The chips per hand that the best response to `opponent` wins in a seat: the best of 64 pure ones."""
    found = []
    for bets in product((0.0, 1.0), repeat=len(_DECISIONS[seat])):
        table = dict(zip(_DECISIONS[seat], bets, strict=True))

        def pure(card: str, actions: str, /, table: dict[tuple[str, str], float] = table) -> float:
            return table[card, actions]

        if seat == 0:
            found.append(expected_payoff(pure, opponent))
        else:
            found.append(-expected_payoff(opponent, pure))
    return max(found)


def exploitability(play: Strategy) -> float:
    """The chips per hand that best responses win from a strategy that takes either seat equally often.

    Half the sum of what the best response wins in each seat. 0 for an equilibrium and for nothing else; 11/24
    for actions drawn blindly.
    """
    return (best_payoff(play, 0) + best_payoff(play, 1)) / 2


def situations(renderer: Renderer) -> dict[tuple[str, str], list[int]]:
    """(card, actions so far) -> the tokens that a policy reads there, whose own actions were digits."""
    found: dict[tuple[str, str], list[int]] = {}
    for card in CARDS:
        first = renderer.opening(as_messages(f"card:{card},your:"))
        second = renderer.opening(as_messages(f"card:{card},"))
        said = renderer.tokenizer.encode("0", add_special_tokens=False)
        passed = [*first, *said, renderer.tokenizer.eos_token_id]
        found[card, ""] = first
        found[card, "01"] = [*passed, *renderer.reply(passed, as_messages("bet,your:"))]
        found[card, "0"] = [*second, *renderer.reply(second, as_messages("pass,your:"))]
        found[card, "1"] = [*second, *renderer.reply(second, as_messages("bet,your:"))]
    return found
