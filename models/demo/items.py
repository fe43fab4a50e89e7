"""Events and endings of word problems that count things; see `openings` for the interface."""

from models.demo.story import Story

MOST = 400  # largest count; a story that exceeds it is generated again

HAVE_NOW = (
    "How many {items} does {name} have now?",
    "How many {items} does {name} have in the end?",
    "How many {items} does {he} have now?",
    "Find the number of {items} that {name} has now.",
    "What is the number of {items} {name} has at the end?",
)
LEFT = (*HAVE_NOW, "How many {items} does {name} have left?")


def gain(s: Story) -> bool:
    """Adds a number of things."""
    n = s.between(2, 60)
    s.question = HAVE_NOW
    s.say(
        (
            "{who} buys {n} more {items}.",
            "{who} finds {n} more {items}.",
            "{who} gets {n} more.",
            "Then {other} gives {him} {n} {items}.",
            "{His} {relative} gives {him} {n} more {items}.",
            "{who} gets {n} more {items} as a gift.",
            "After that {he} adds {n} {items}.",
        ),
        n=n,
    )
    s.value = s.work("{n} more {items}", s.value, "+", n, n=n)
    return True


def lose(s: Story) -> bool:
    """Removes a number of things."""
    if s.value < 6:
        return False
    n = s.between(2, min(s.value - 2, 90))
    s.question = (
        *HAVE_NOW,
        "How many {items} are left?",
        "How many {items} does {name} have left?",
    )
    s.say(
        (
            "{who} gives {n} {items} to {other}.",
            "{who} gives {n} to {other}.",
            "{who} gives away {n} of them.",
            "{who} loses {n} {items}.",
            "Then {he} uses {n} of the {items}.",
            "{who} gives away {n} of {his} {items}.",
            "{n} of the {items} get lost.",
            "{who} hands {n} {items} to {his} {relative}.",
        ),
        n=n,
    )
    s.value = s.work("{n} fewer {items}", s.value, "-", n, n=n)
    return True


def double(s: Story) -> bool:
    """Doubles the number."""
    if s.value > 99:
        return False
    s.question = HAVE_NOW
    s.say(
        (
            "Then {he} doubles the number of {items}.",
            "{who} works on until {he} has twice as many {items}.",
        )
    )
    s.value = s.work("Twice as many {items}", s.value, "*", 2)
    return True


def half(s: Story) -> bool:
    """Gives half of the things away."""
    if s.value % 2 or not 4 <= s.value <= 200:
        return False
    s.question = (
        *HAVE_NOW,
        "How many {items} are left?",
        "How many {items} does {name} have left?",
    )
    s.say(
        (
            "{who} gives half of the {items} to {other}.",
            "Half of the {items} get lost.",
            "{who} gives away half of {his} {items}.",
        )
    )
    s.value = s.work("Half of the {items}", s.value, "/", 2)
    return True


def gain_boxes(s: Story) -> bool:
    """Adds equal boxes of things."""
    k, m = s.between(2, 9), s.between(2, 12)
    s.question = HAVE_NOW
    s.say(
        (
            "{who} buys {k} {boxes} with {m} more {items} in each.",
            "Then {he} gets {k} more {boxes} of {items}. Each {box} holds {m} {items}.",
            "{who} adds {k} {boxes} of {m} {items} each.",
        ),
        k=k,
        m=m,
    )
    more = s.work("{k} {boxes} of {m} {items}", k, "*", m, k=k, m=m)
    s.value = s.work("{n} more {items}", s.value, "+", more, n=more)
    return True


def give_each(s: Story) -> bool:
    """Gives the same number to each friend."""
    k, m = s.between(2, 9), s.between(2, 9)
    if k * m > s.value - 2:
        return False
    s.question = LEFT
    s.say(
        (
            "{who} gives {m} {items} to each of {his} {k} friends.",
            "Then {k} friends come, and each of them takes {m} {items}.",
            "{who} gives {k} friends {m} {items} each.",
        ),
        k=k,
        m=m,
    )
    gone = s.work("{k} friends with {m} {items} each", k, "*", m, k=k, m=m)
    s.value = s.work("{n} fewer {items}", s.value, "-", gone, n=gone)
    return True


def give_part(s: Story) -> bool:
    """Gives a third, a quarter or a percentage away."""
    parts = {"a third": 3, "a quarter": 4, "25%": 4, "20%": 5, "10%": 10}
    fits = [name for name, k in parts.items() if s.value % k == 0 and 1 < s.value // k <= 30]
    if not fits:
        return False
    part = s.rng.choice(fits)
    s.question = LEFT
    s.say(
        (
            "{who} gives {part} of the {items} to {other}.",
            "{who} gives away {part} of {his} {items}.",
        ),
        part=part,
    )
    label = part[0].upper() + part[1:]
    gone = s.work("{part} of the {items}", s.value, "/", parts[part], part=label)
    s.value = s.work("{n} fewer {items}", s.value, "-", gone, n=gone)
    return True


def share_things(s: Story) -> bool:
    """Divides the things among friends."""
    if not (k := s.divisor()):
        return False
    s.question = (
        "How many {items} does each friend get?",
        "How many {items} are there for each friend?",
    )
    s.say(
        (
            "{who} shares all the {items} equally among {k} friends.",
            "Then {k} friends divide all the {items} equally.",
        ),
        k=k,
    )
    s.value = s.work("Shared by {k} friends", s.value, "/", k, k=k)
    return True


def pack(s: Story) -> bool:
    """Packs the things into equal boxes."""
    if not (k := s.divisor()):
        return False
    s.question = ("How many {boxes} does {name} need?", "How many {boxes} does {he} fill?")
    s.say(
        (
            "{who} packs all the {items} into {boxes} of {k}.",
            "Then {he} puts all the {items} into {boxes}, with {k} in each {box}.",
        ),
        k=k,
    )
    s.value = s.work("Packed into {boxes} of {k}", s.value, "/", k, k=k)
    return True


def compare_more(s: Story) -> bool:
    """Ends with the difference to another person's number."""
    if s.value < 8:
        return False
    n = s.between(2, min(s.value - 2, 90))
    s.question = (
        "How many more {items} does {name} have than {his} friend?",
        "How many fewer {items} does the friend have?",
    )
    s.say(("A friend of {name} has {n} {items}.", "{His} friend has {n} {items}."), n=n)
    s.value = s.work("The difference", s.value, "-", n)
    return True


def compare_total(s: Story) -> bool:
    """Ends with the sum with another person's number."""
    n = s.between(5, 80)
    s.question = (
        "How many {items} do they have together?",
        "How many {items} do {name} and the friend have in total?",
    )
    s.say(("A friend of {name} has {n} {items}.", "{His} friend has {n} {items}."), n=n)
    s.value = s.work("Together", s.value, "+", n)
    return True


EVENTS = ((1, gain), (1, lose), (1, double), (1, half), (2, gain_boxes), (2, give_each))
EVENTS += ((2, give_part),)
ENDINGS = ((1, share_things), (1, pack), (1, compare_more), (1, compare_total))
