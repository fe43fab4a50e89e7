"""Words for the generators: people, things, places and made-up words."""

import random
from typing import NamedTuple


class Person(NamedTuple):
    """A name with its pronouns."""

    name: str
    he: str
    him: str
    his: str


class Thing(NamedTuple):
    """A countable thing and its container."""

    item: str
    items: str
    box: str
    boxes: str


def words(text: str) -> list[str]:
    """Splits a text into words."""
    return text.split()


_SHE = (
    "Ada Alma Amy Anna Ava Bella Carla Clara Dora Elena Ella Emma Eva Fay Gina Grace Hana Ida Ines "
    "Iris Ivy Jane June Kate Lara Lena Lily Lucy Maya Mia Mona Nina Nora Olga Pia Rosa Ruth Sara "
    "Tina Uma Vera Zoe"
)
_HE = (
    "Abel Adam Alan Amir Ben Carl Cole Dan Eli Emil Eric Evan Finn Fred Gus Hugo Ian Ivan Jack "
    "James Jon Karl Kofi Leo Liam Luis Mark Max Milo Noah Omar Otto Paul Raj Ravi Sam Sven Theo "
    "Tim Tom Victor Yusuf"
)
WOMEN = [Person(name, "she", "her", "her") for name in _SHE.split()]
MEN = [Person(name, "he", "him", "his") for name in _HE.split()]

# Thing, its plural, box, its plural; an empty plural ends in s, and _ stands for a space.
_THINGS = (
    "apple//basket/ pear//crate/ orange//crate/ lemon//bag/ peach/peaches/box/boxes "
    "plum//bowl/ carrot//bag/ potato/potatoes/sack/ onion//sack/ tomato/tomatoes/tray/ "
    "egg//carton/ cookie//tin/ muffin//tray/ cupcake//box/boxes sandwich/sandwiches/plate/ "
    "marble//bag/ bead//jar/ button//tin/ shell//bucket/ stone//bucket/ stamp//album/ "
    "sticker//sheet/ card//pack/ photo//album/ ticket//roll/ badge//case/ pencil//box/boxes "
    "pen//case/ crayon//box/boxes notebook//pile/ book//shelf/shelves magazine//stack/ "
    "postcard//pack/ candle//box/boxes ribbon//drawer/ balloon//bag/ flower//vase/ "
    "rose//bunch/bunches tulip//bunch/bunches seed//packet/ ball//bin/ toy_car//box/boxes "
    "doll//shelf/shelves puzzle//carton/ block//bin/ cup//tray/ plate//stack/ bottle//crate/ "
    "brick//pallet/ nail//tin/ key//ring/ hat//rack/ sock//drawer/ scarf/scarves/basket/ "
    "bracelet//case/ "
)


def _thing(entry: str) -> Thing:
    item, items, box, boxes = entry.replace("_", " ").split("/")
    return Thing(item, items or item + "s", box, boxes or box + "s")


THINGS = [_thing(entry) for entry in words(_THINGS)]
GOODS = words(
    "book kite hat lamp game ball bag scarf mug puzzle poster plant shirt belt clock map "
    "drum flute camera radio chair jacket"
)
RELATIVES = words("brother sister cousin uncle aunt mother father neighbor teacher")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
COLORS = words("red blue green yellow white black purple orange brown pink gray silver")
CITIES = words(
    "Lisbon Oslo Turin Lyon Quito Nairobi Osaka Perth Boston Denver Dublin Geneva Hanoi Krakow "
    "Malaga Porto Riga Seville Tampa Vienna Zagreb Bergen Cairo Delhi"
)
STREETS = words("Oak Maple Hill Lake River Park Mill Church Garden Station Forest Bridge")
_ONSETS = words("b br c d dr f g gr h j k kl l m n p pl r s sk st t tr v w z")
_VOWELS = words("a e i o u ai ea oo")
_ENDS = words("l m n r s t x ck nd")


def invented(rng: random.Random) -> str:
    """Samples a made-up word of two or three syllables, which can only be copied."""
    pick = rng.choice
    syllables = [pick(_ONSETS) + pick(_VOWELS) for _ in range(rng.randrange(1, 3))]
    return "".join(syllables) + pick(_ONSETS) + pick(_VOWELS) + pick(_ENDS)


def code_number(rng: random.Random) -> str:
    """Samples an order or part number such as `KT-4821`."""
    letters = "ABCDEFGHKLMNPRSTVWXZ"
    return f"{rng.choice(letters)}{rng.choice(letters)}-{rng.randrange(1000, 10000)}"
