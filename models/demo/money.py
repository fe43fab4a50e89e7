"""Events and endings of word problems about money; see `openings` for the interface."""

from models.demo.openings import PAY
from models.demo.story import Story
from models.demo.words import GOODS

HAVE_NOW = (
    "How much money does {name} have now?",
    "How many dollars does {name} have now?",
    "How many dollars does {he} have in the end?",
)
LEFT = (*HAVE_NOW, "How much money does {name} have left?")


def earn(s: Story) -> bool:
    """Adds an amount."""
    n = s.between(2, 60)
    s.question = HAVE_NOW
    s.say(
        (
            "{who} earns {n} more dollars.",
            "{His} {relative} gives {him} ${n}.",
            "Then {he} gets ${n} for washing cars.",
            "{who} finds {n} dollars in a coat.",
        ),
        n=n,
    )
    s.value = s.work("${n} more", s.value, "+", n, n=n)
    return True


def spend(s: Story) -> bool:
    """Subtracts an amount."""
    if s.value < 8:
        return False
    n = s.between(2, min(s.value - 2, 80))
    good = s.rng.choice(GOODS)
    s.question = LEFT
    s.say(
        (
            "{who} spends ${n} on a {thing}.",
            "{who} buys a {thing} for {n} dollars.",
            "Then {he} pays ${n} for a {thing}.",
            "{who} gives {n} dollars to {other}.",
        ),
        n=n,
        thing=good,
    )
    s.value = s.work("${n} less", s.value, "-", n, n=n)
    return True


def buy_several(s: Story) -> bool:
    """Buys several things of one price."""
    k, p = s.between(2, 6), s.between(2, 15)
    if k * p > s.value - 2:
        return False
    good = s.rng.choice(GOODS) + "s"
    s.question = LEFT
    s.say(
        (
            "{who} buys {k} {things} for ${p} each.",
            "{who} buys {k} {things} that cost {p} dollars each.",
            "Then {he} pays for {k} {things} at ${p} each.",
        ),
        k=k,
        p=p,
        things=good,
    )
    cost = s.work("{k} {things} at ${p}", k, "*", p, k=k, p=p, things=good)
    s.value = s.work("${n} less", s.value, "-", cost, n=cost)
    return True


def sell(s: Story) -> bool:
    """Sells every counted thing; the quantity is an amount of money afterwards."""
    if not 2 <= s.value <= 99:
        return False
    p = s.between(2, 9)
    s.question = PAY
    s.say(
        (
            "{who} sells all the {items} for ${p} each.",
            "Then {he} sells every {item} for {p} dollars.",
            "{who} sells all of them at {p} dollars each.",
        ),
        p=p,
    )
    s.value = s.work("{n} {items} at ${p}", s.value, "*", p, n=s.value, p=p)
    return True


def share_money(s: Story) -> bool:
    """Divides the money among friends."""
    if not (k := s.divisor()):
        return False
    s.question = ("How many dollars does each of them get?", "How much money does each one get?")
    s.say(
        (
            "{who} divides all {his} money equally among {k} friends.",
            "Then {k} cousins of {name} get all the money in equal parts.",
        ),
        k=k,
    )
    s.value = s.work("Shared by {k}", s.value, "/", k, k=k)
    return True


def can_buy(s: Story) -> bool:
    """Ends with the number of things that the money buys."""
    if not (k := s.divisor()):
        return False
    s.question = (
        "How many {items} can {name} buy with that?",
        "How many {items} can {he} get for all {his} money?",
    )
    s.say(("One {item} costs ${p}.", "Each {item} costs {p} dollars."), p=k)
    s.value = s.work("At ${p} each", s.value, "/", k, p=k)
    return True


def still_needs(s: Story) -> bool:
    """Ends with the amount that is missing for an expensive thing."""
    total = s.value + s.between(5, 90)
    s.question = (
        "How much more money does {name} need?",
        "How many more dollars does {he} need to buy it?",
    )
    s.say(
        ("{who} wants to buy a bicycle for ${n}.", "The tent that {he} wants costs {n} dollars."),
        n=total,
    )
    s.value = s.work("Still missing", total, "-", s.value)
    return True


EVENTS = ((1, earn), (1, spend), (2, buy_several))
ENDINGS = ((1, share_money), (1, can_buy), (1, still_needs))
