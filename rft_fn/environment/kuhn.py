"""Kuhn poker, played by one policy against itself."""

from itertools import permutations
from typing import NamedTuple

from rft_fn import rng
from rft_fn.environment.record import Environment, Row, Stepped

__all__ = ["Hand", "kuhn_poker"]


_CARDS = "jqk"
_CHIPS = {"00": 1, "10": 1, "11": 2, "010": 1, "011": 2}  # the actions of a hand -> chips that are won
_FOLDS = {"10": 0, "010": 1}  # the hands that end by giving up -> who wins
_ACTIONS = {"0": "pass", "1": "bet"}
_KUHN_ROW = {"question": "Play a hand of Kuhn poker.", "short": "kuhn="}
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
        chips = _CHIPS.get(self.actions)
        if chips is None:
            return None
        winner = _FOLDS.get(self.actions)
        if winner is None:
            winner = int(_CARDS.index(self.cards[1]) > _CARDS.index(self.cards[0]))
        return chips * (1 - 2 * winner)


def kuhn_poker(level: int = 1) -> Environment:
    """Make Kuhn poker with two seats, both played by the policy; `level` makes no difference.

    Three cards, jack, queen and king; each player pays one chip and gets a card. The first passes or bets a
    chip, then the second; who passes against a bet gives up the pot, and a bet against a pass can still be
    met. The higher card wins. With best play the first player loses 1/18 of a chip per hand (Kuhn, 1950).

    A response is 0 or pass, 1 or bet; anything else ends the hand and pays the other seat two chips. Rewards
    are the chips won: their sum is 0. The cards are drawn from the key, so the samples of a prompt play the
    same ones.
    """
    return Environment(
        name="kuhn_poker",
        reset=_deal,
        step=_play_card,
        seats=2,
        seat=lambda hand: hand.seat,
        rows=lambda seed, index: _KUHN_ROW | {"hand": str(index)},
        teacher=_kuhn_teacher,
        warm_up=60,
    )


def _deal(row: Row, key: int) -> tuple[Hand, list[str]]:
    """Deal two cards; each seat sees its own, and the second waits for the first."""
    deals = list(permutations(_CARDS, 2))
    cards = "".join(deals[rng.fold_in(key, "deal") % len(deals)])
    first, second = (f"card:{card}," for card in cards)
    return Hand(cards), [f"{first}your:", second]


def _play_card(hand: Hand, response: str) -> Stepped:
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
    seen[1 - seat] = f"{_ACTIONS[action]},your:"
    payoff = hand.payoff
    if payoff is None:
        return Stepped(hand, seen, [0.0, 0.0], False)
    shown = f"{_ACTIONS[action]},{hand.cards[0]}:{hand.cards[1]}"
    return Stepped(hand, [shown, shown], [float(payoff), float(-payoff)], True)


def _kuhn_teacher(hand: Hand, key: int) -> str:
    """Bet more often with a higher card: who learns from it reads the cards, and plays badly."""
    quarters = 1 + _CARDS.index(hand.cards[hand.seat])
    return str(int(rng.fold_in(key, "action") % 4 < quarters))
