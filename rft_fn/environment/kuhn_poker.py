"""Kuhn poker, played by one policy against itself.

Three cards, jack, queen and king; each player pays one chip and gets a card. The first passes or bets a chip,
then the second; who passes against a bet gives up the pot, and a bet against a pass can still be met. The
higher card wins. With best play the first player loses 1/18 of a chip per hand (Kuhn, 1950).
"""

from collections.abc import Iterator
from itertools import permutations, product
from typing import NamedTuple, Protocol

from rft_fn import rng
from rft_fn.environment.record import Environment, Renderer, Row, Stepped, as_messages

__all__ = [
    "Hand", "Strategy", "best_payoff", "expected_payoff", "exploitability", "hands", "kuhn_poker", "nash",
    "situations",
]  # fmt: skip

CARDS = "jqk"
_ENDS = {"00": 1, "10": 1, "11": 2, "010": 1, "011": 2}  # the actions of a hand -> chips that are won
_FOLDS = {"10": 0, "010": 1}  # the hands that end by giving up -> who wins
_NAMES = {"0": "pass", "1": "bet"}
_FORFEIT = 2.0  # chips that an answer costs which is no action


class Hand(NamedTuple):
    """The cards of both players, and the actions so far: 0 is a pass, 1 a bet or a call."""

    cards: str
    actions: str = ""

    @property
    def seat(self) -> int:
        """Who acts next."""
        return len(self.actions) % 2

    @property
    def payoff(self) -> int | None:
        """The chips that seat 0 wins; None while the hand goes on."""
        chips = _ENDS.get(self.actions)
        if chips is None:
            return None
        winner = _FOLDS.get(self.actions)
        if winner is None:
            winner = int(CARDS.index(self.cards[1]) > CARDS.index(self.cards[0]))
        return chips * (1 - 2 * winner)


def kuhn_poker(level: int = 1) -> Environment:
    """Kuhn poker with two seats, both played by the policy; `level` makes no difference.

    A response is 0 or pass, 1 or bet; anything else ends the hand and pays the other seat two chips. Rewards
    are the chips won: their sum is 0. The cards are drawn from the key, so the samples of a prompt play the
    same ones.
    """
    plain = Environment("kuhn_poker", _reset, _step, seats=2, seat=_seat)
    return plain._replace(rows=_rows, teacher=_teacher, warm_up=60)


def _rows(seed: int, index: int) -> dict[str, str]:
    return {"question": "Play a hand of Kuhn poker.", "short": "kuhn=", "hand": str(index)}


def _reset(row: Row, key: int) -> tuple[Hand, list[str]]:
    """Deal two cards; each seat sees its own, and the second waits for the first."""
    deals = list(permutations(CARDS, 2))
    cards = "".join(deals[rng.fold_in(key, "deal") % len(deals)])
    first, second = (f"card:{card}," for card in cards)
    return Hand(cards), [f"{first}your:", second]


def _seat(hand: Hand) -> int:
    return hand.seat


def _step(hand: Hand, response: str) -> Stepped:
    """Play one action."""
    seat = hand.seat
    said = response.strip().lower()
    action = {"0": "0", "1": "1", "pass": "0", "bet": "1"}.get(said)
    seen = ["", ""]
    if action is None:
        forfeit = [_FORFEIT, _FORFEIT]
        forfeit[seat] = -_FORFEIT
        seen[1 - seat] = "forfeit"
        return Stepped(hand, seen, forfeit, True)

    hand = hand._replace(actions=hand.actions + action)
    seen[1 - seat] = f"{_NAMES[action]},your:"
    payoff = hand.payoff
    if payoff is None:
        return Stepped(hand, seen, [0.0, 0.0], False)
    shown = f"{_NAMES[action]},{hand.cards[0]}:{hand.cards[1]}"
    return Stepped(hand, [shown, shown], [float(payoff), float(-payoff)], True)


def _teacher(hand: Hand, key: int) -> str:
    """Bet more often with a higher card: who learns from it reads the cards, and plays badly."""
    quarters = 1 + CARDS.index(hand.cards[hand.seat])
    return str(int(rng.fold_in(key, "action") % 4 < quarters))


# ---------- the game as a tree


class Strategy(Protocol):
    """A way to play."""

    def __call__(self, card: str, actions: str, /) -> float:
        """The probability to bet or call with this card after these actions."""
        ...


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
