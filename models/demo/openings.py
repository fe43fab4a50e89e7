"""Openings of word problems: they give a person some things, or some money.

A part of a story (an opening, an event or an ending) takes the story, adds sentences and steps, and
returns True. It returns False and adds nothing if the current quantity does not permit it. The
tables contain the number of operations of each part.
"""

from models.demo.story import Story
from models.demo.words import DAYS

HAVE = (
    "How many {items} does {name} have?",
    "How many {items} does {name} have in total?",
    "How many {items} does {he} have altogether?",
    "What is the total number of {items} that {name} has?",
)
OWN = ("How much money does {name} have?", "How many dollars does {name} have?")
PAY = (
    "How much money does {name} make?",
    "How many dollars does {name} get?",
    "How many dollars does {he} earn?",
)


def has(s: Story) -> bool:
    """Starts with a number of things."""
    s.value = s.between(3, 90)
    s.question = HAVE
    s.say(
        (
            "{name} has {n} {items}.",
            "{name} owns {n} {items}.",
            "{name} starts with {n} {items}.",
            "At first {name} has {n} {items}.",
            "{name} collected {n} {items}.",
            "There are {n} {items} in {name}'s {box}.",
            "On {day}, {name} had {n} {items}.",
        ),
        n=s.value,
    )
    return True


def boxes(s: Story) -> bool:
    """Starts with equal boxes of things."""
    k, m = s.between(2, 9), s.between(2, 20)
    s.question = HAVE
    s.say(
        (
            "{name} has {k} {boxes} with {m} {items} in each.",
            "{name} has {k} {boxes} of {items}. Each {box} holds {m} {items}.",
            "{name} buys {k} {boxes}. Every {box} has {m} {items} in it.",
            "{name} fills {k} {boxes} with {m} {items} each.",
            "{name} puts {m} {items} into each of {k} {boxes}.",
        ),
        k=k,
        m=m,
    )
    s.value = s.work("{k} {boxes} of {m} {items}", k, "*", m, k=k, m=m)
    return True


def two_days(s: Story) -> bool:
    """Starts with things of two days."""
    a, b = s.between(2, 80), s.between(2, 80)
    first = s.rng.randrange(6)
    days = {"day1": DAYS[first], "day2": DAYS[first + 1]}
    s.question = HAVE
    s.say(
        (
            "{name} gets {a} {items} on {day1} and {b} {items} on {day2}.",
            "On {day1} {name} finds {a} {items}, and on {day2} {he} finds {b} more.",
            "{name} makes {a} {items} on {day1}. On {day2} {he} makes {b} {items}.",
            "{name} collected {a} {items} on {day1} and {b} on {day2}.",
        ),
        a=a,
        b=b,
        **days,
    )
    s.value = s.work("{day1} and {day2}", a, "+", b, **days)
    return True


def more_than(s: Story) -> bool:
    """Starts with more than another person has."""
    a, b = s.between(2, 80), s.between(2, 50)
    s.question = HAVE
    s.say(
        (
            "{other} has {a} {items}. {name} has {b} more {items} than {other}.",
            "{other} owns {a} {items}, and {name} has {b} more than that.",
            "{name} has {b} more {items} than {other}, who has {a}.",
        ),
        others=True,
        a=a,
        b=b,
    )
    s.value = s.work("{name} has {b} more than {other}", a, "+", b, b=b)
    return True


def fewer_than(s: Story) -> bool:
    """Starts with fewer than another person has."""
    a = s.between(20, 90)
    b = s.between(2, a - 5)
    s.question = HAVE
    s.say(
        (
            "{other} has {a} {items}. {name} has {b} fewer {items} than {other}.",
            "{other} owns {a} {items}, and {name} has {b} less than that.",
            "{name} has {b} fewer {items} than {other}, who has {a}.",
        ),
        others=True,
        a=a,
        b=b,
    )
    s.value = s.work("{name} has {b} fewer than {other}", a, "-", b, b=b)
    return True


def times_as_many(s: Story) -> bool:
    """Starts with a multiple of another person's number."""
    a, k = s.between(3, 30), s.between(2, 5)
    times = "twice" if k == 2 else f"{k} times"
    s.question = HAVE
    s.say(
        (
            "{other} has {a} {items}. {name} has {times} as many {items} as {other}.",
            "{other} owns {a} {items}, and {name} has {times} as many.",
            "{name} has {times} as many {items} as {other}, who has {a}.",
        ),
        others=True,
        a=a,
        times=times,
    )
    s.value = s.work("{name} has {times} as many as {other}", a, "*", k, times=times)
    return True


def dozens(s: Story) -> bool:
    """Starts with whole dozens."""
    d = s.between(2, 9)
    s.question = HAVE
    s.say(("{name} has {d} dozen {items}.", "{name} buys {d} dozen {items}."), d=d)
    s.value = s.work("{d} dozen {items}", d, "*", 12, d=d)
    return True


def daily(s: Story) -> bool:
    """Starts with the same number each day."""
    p, d = s.between(2, 20), s.between(2, 9)
    s.question = HAVE
    s.say(
        (
            "{name} makes {p} {items} each day for {d} days.",
            "Every day {name} finds {p} {items}. {He} does this for {d} days.",
            "For {d} days {name} collects {p} {items} a day.",
        ),
        p=p,
        d=d,
    )
    s.value = s.work("{d} days with {p} {items} each", d, "*", p, d=d, p=p)
    return True


def weekly(s: Story) -> bool:
    """Starts with the same number each day for some weeks."""
    p, w = s.between(2, 9), s.between(2, 5)
    s.question = HAVE
    s.say(
        (
            "{name} makes {p} {items} every day for {w} weeks.",
            "For {w} weeks {name} collects {p} {items} a day.",
        ),
        p=p,
        w=w,
    )
    days = s.work("Days in {w} weeks", w, "*", 7, w=w)
    s.value = s.work("{days} days with {p} {items} each", days, "*", p, days=days, p=p)
    return True


def saved(s: Story) -> bool:
    """Starts with an amount of money."""
    s.value = s.between(5, 120)
    s.question = OWN
    s.say(
        (
            "{name} has {n} dollars.",
            "{name} has saved ${n}.",
            "{name} starts with ${n}.",
            "In {his} wallet {name} has {n} dollars.",
        ),
        n=s.value,
    )
    return True


def wage(s: Story) -> bool:
    """Starts with hours at a rate."""
    h, r = s.between(2, 12), s.between(3, 25)
    s.question = PAY
    s.say(
        (
            "{name} works {h} hours and earns ${r} an hour.",
            "{name} earns {r} dollars per hour and works for {h} hours.",
            "For every hour of work {name} is paid ${r}. {He} works {h} hours.",
        ),
        h=h,
        r=r,
    )
    s.value = s.work("{h} hours at ${r}", h, "*", r, h=h, r=r)
    return True


def weekly_wage(s: Story) -> bool:
    """Starts with hours a day for some days at a rate."""
    h, d, r = s.between(2, 8), s.between(2, 6), s.between(2, 9)
    s.question = PAY
    s.say(
        (
            "{name} works {h} hours a day for {d} days and earns ${r} an hour.",
            "{name} is paid {r} dollars per hour. {He} works {h} hours on each of {d} days.",
        ),
        h=h,
        d=d,
        r=r,
    )
    hours = s.work("{d} days of {h} hours", d, "*", h, d=d, h=h)
    s.value = s.work("{hours} hours at ${r}", hours, "*", r, hours=hours, r=r)
    return True


THINGS = ((0, has), (1, boxes), (1, two_days), (1, more_than), (1, fewer_than))
THINGS += ((1, times_as_many), (1, dozens), (1, daily), (2, weekly))
MONEY = ((0, saved), (1, wage), (2, weekly_wage))
