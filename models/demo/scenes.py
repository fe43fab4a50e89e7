"""Word problems with fixed plans: shopping, reading, travel, time, ages, lengths, prices, seats."""

from models.demo.story import Story
from models.demo.words import GOODS


def shopping(s: Story) -> None:
    """Shopping for two kinds of goods: change or total."""
    a, p, b, q = s.between(2, 9), s.between(2, 15), s.between(2, 9), s.between(2, 15)
    one, two = s.rng.sample(GOODS[:20], 2)
    s.say(
        (
            "{name} buys {a} {one}s for ${p} each and {b} {two}s for ${q} each.",
            "A {one} costs {p} dollars and a {two} costs {q} dollars. {name} buys {a} {one}s and "
            "{b} {two}s.",
            "At the shop a {one} is ${p} and a {two} is ${q}. {name} takes {a} {one}s and "
            "{b} {two}s.",
        ),
        **{"a": a, "p": p, "b": b, "q": q, "one": one, "two": two},
    )
    first = s.work("{a} {one}s at ${p}", a, "*", p, a=a, p=p, one=one)
    second = s.work("{b} {two}s at ${q}", b, "*", q, b=b, q=q, two=two)
    s.value = s.work("Together", first, "+", second)
    s.question = (
        "How much does {name} pay in total?",
        "How many dollars does {name} spend?",
        "What is the total cost in dollars?",
    )
    if s.rng.random() < 0.5:
        note = s.value + s.between(2, 60)
        s.say(("{who} pays with ${n}.", "{who} gives the clerk {n} dollars."), n=note)
        s.value = s.work("The change", note, "-", s.value)
        s.question = ("How much change does {name} get?", "How many dollars does {he} get back?")


def reading(s: Story) -> None:
    """Remaining pages of a book, or days to read it."""
    p, d = s.between(4, 25), s.between(2, 9)
    read = p * d
    if s.rng.random() < 0.5:
        total = read + s.between(5, 90)
        s.say(
            (
                "{name} is reading a book of {n} pages. {He} reads {p} pages a day for {d} days.",
                "A book has {n} pages. For {d} days {name} reads {p} pages every day.",
            ),
            n=total,
            p=p,
            d=d,
        )
        s.work("{d} days with {p} pages each", d, "*", p, d=d, p=p)
        s.value = s.work("Pages left", total, "-", read)
        s.question = ("How many pages are left?", "How many pages does {name} still have to read?")
        return
    done = s.between(5, 60)
    s.say(
        (
            "{name} is reading a book of {n} pages. {He} has read {m} pages. From now on {he} "
            "reads {p} pages a day.",
            "A book has {n} pages, and {name} has read {m} of them. {He} reads {p} pages a day.",
        ),
        n=read + done,
        m=done,
        p=p,
    )
    left = s.work("Pages left", read + done, "-", done)
    s.value = s.work("At {p} pages a day", left, "/", p, p=p)
    s.question = ("How many days does the rest take?", "In how many days is {name} done?")


def travel(s: Story) -> None:
    """Travel in two parts at different speeds."""
    v, h, more = s.between(3, 60), s.between(2, 6), s.between(4, 60)
    s.say(
        (
            "{name} rides {v} miles an hour for {h} hours.",
            "{name} travels for {h} hours at {v} miles per hour.",
        ),
        v=v,
        h=h,
    )
    s.value = s.work("{h} hours at {v} miles an hour", h, "*", v, h=h, v=v)
    s.question = ("How many miles does {name} travel in total?", "How far does {he} go, in miles?")
    if s.rng.random() < 0.7:
        s.say(("Then {he} walks {n} more miles.", "{who} goes on for {n} miles."), n=more)
        s.value = s.work("{n} more miles", s.value, "+", more, n=more)


def minutes(s: Story) -> None:
    """Hours and minutes in minutes."""
    h, m = s.between(2, 9), s.between(5, 55)
    s.say(
        (
            "{name} practices for {h} hours and {m} minutes.",
            "A trip with {name} takes {h} hours and {m} minutes.",
            "{name} worked for {h} hours and then for {m} minutes.",
        ),
        h=h,
        m=m,
    )
    whole = s.work("Minutes in {h} hours", h, "*", 60, h=h)
    s.value = s.work("{m} more minutes", whole, "+", m, m=m)
    s.question = ("How many minutes is that?", "How many minutes is that in total?")
    if s.rng.random() < 0.4:
        n = s.between(5, 60)
        s.say(("{n} minutes of it were a break.", "{who} rested for {n} of the minutes."), n=n)
        s.value = s.work("{n} fewer minutes", s.value, "-", n, n=n)
        s.question = ("How many minutes are left without it?", "How many minutes remain?")


def ages(s: Story) -> None:
    """Ages of people, now or in some years."""
    a, k, y = s.between(4, 15), s.between(2, 5), s.between(2, 20)
    times = "twice" if k == 2 else f"{k} times"
    s.say(
        (
            "{other} is {a} years old. {name} is {times} as old as {other}.",
            "{name} is {times} as old as {other}, who is {a}.",
        ),
        others=True,
        a=a,
        times=times,
    )
    s.value = s.work("{name} is {times} as old as {other}", a, "*", k, times=times)
    s.question = ("How old is {name}?", "What is the age of {name}?")
    form = s.rng.randrange(3)
    if form == 1:
        s.value = s.work("In {y} years", s.value, "+", y, y=y)
        s.question = (f"How old will {{name}} be in {y} years?",)
    if form == 2:
        s.say(("{name}'s {relative} is {y} years older than {name}.",), others=True, y=y)
        s.value = s.work("{y} years older", s.value, "+", y, y=y)
        s.question = ("How old is the {relative}?", "What is the age of {name}'s {relative}?")


def lengths(s: Story) -> None:
    """A rope in meters, cut in pieces of centimeters."""
    m, piece = s.between(2, 9), s.rng.choice((5, 10, 20, 25, 50))
    s.say(
        (
            "{name} has a rope of {m} meters. {He} cuts it into pieces of {p} centimeters.",
            "A rope is {m} meters long. {name} cuts it into pieces of {p} centimeters each.",
        ),
        m=m,
        p=piece,
    )
    whole = s.work("Centimeters in {m} meters", m, "*", 100, m=m)
    s.value = s.work("Pieces of {p} centimeters", whole, "/", piece, p=piece)
    s.question = ("How many pieces are there?", "How many pieces does {name} get?")
    if s.rng.random() < 0.5:
        n = s.between(2, s.value - 2)
        s.say(("{who} uses {n} pieces.", "{n} of the pieces are given to {other}."), n=n)
        s.value = s.work("{n} fewer pieces", s.value, "-", n, n=n)
        s.question = ("How many pieces are left?",)


def sale(s: Story) -> None:
    """A price with a discount, for several."""
    price, percent, k = 20 * s.between(1, 6), s.rng.choice((10, 20, 25, 50)), s.between(2, 6)
    s.say(
        (
            "A {good} costs ${n}. Today it is {percent}% off.",
            "The price of a {good} is {n} dollars. In the sale {name} gets {percent}% off.",
        ),
        n=price,
        percent=percent,
    )
    off = s.work("{percent}% of ${n}", price, "/", 100 // percent, percent=percent, n=price)
    s.value = s.work("The price in the sale", price, "-", off)
    s.question = ("How much does the {good} cost now?", "What is the new price in dollars?")
    if s.rng.random() < 0.6:
        s.say(("{name} buys {k} of them.", "{name} takes {k}."), k=k)
        s.value = s.work("{k} of them", s.value, "*", k, k=k)
        s.question = ("How much does {name} pay?", "How many dollars does {name} spend?")


def seats(s: Story) -> None:
    """Rows of seats, some taken."""
    r, c = s.between(3, 12), s.between(4, 20)
    taken = s.between(3, r * c - 3)
    place = s.rng.choice(("hall", "theater", "cinema", "train car"))
    s.say(
        (
            "A {place} has {r} rows of {c} seats.",
            "In a {place} there are {r} rows with {c} seats in each row.",
        ),
        others=True,
        r=r,
        c=c,
        place=place,
    )
    s.value = s.work("{r} rows of {c} seats", r, "*", c, r=r, c=c)
    s.question = ("How many seats are there?", "How many seats does it have?")
    if s.rng.random() < 0.7:
        s.say(("{n} seats are taken.", "{n} people sit down."), others=True, n=taken)
        s.value = s.work("Free seats", s.value, "-", taken)
        s.question = ("How many seats are free?", "How many seats are empty?")


def rectangle(s: Story) -> None:
    """The area or the way around a garden."""
    a, b = s.between(3, 30), s.between(2, 12)
    s.say(
        (
            "A garden is {a} feet long and {b} feet wide.",
            "{name} has a yard that is {a} feet long and {b} feet wide.",
        ),
        a=a,
        b=b,
    )
    if s.rng.random() < 0.5:
        s.value = s.work("Length times width", a, "*", b)
        s.question = ("What is its area in square feet?", "How many square feet is that?")
        return
    side = s.work("Length and width", a, "+", b)
    s.value = s.work("Both sides twice", side, "*", 2)
    s.question = ("How long is a fence around it, in feet?", "How many feet is it all around?")


SCENES = (shopping, reading, travel, minutes, ages, lengths, sale, seats, rectangle)
