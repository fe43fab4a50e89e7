"""Mailboxes: where ranks on the GPUs of one host leave each other what they have computed.

Each rank has a piece of its GPU's memory in which all ranks write; no address of it is known to a
compiler. What is sent is finished values and the number of the call, so nothing is ever emptied:

    head | flags [programs, ranks] | words [2, ranks, WORDS] | blocks [2, ranks, bytes]

Few values are words, four bytes of them and four of the number, which are written and read at once:
a word that has come says so itself, whatever its value. Many are blocks, stored as they are, with a
flag for each program that has stored its own. There are two of each, for even and for odd numbers:
a rank that sends in call n + 2 has received in call n + 1 what each other rank sent after all of
its call n. Every call therefore sends to all ranks and receives from all.

The head has an error, and in JAX a clock. In torch a step tells each call its number. In JAX it
cannot: layers that are alike are traced once, and XLA orders the calls. It orders them alike for
all ranks, whose program is one, so that there the call asks the clock: all programs of a kernel
read it, and the last one to say so sets it.

Both languages have the same assembly but for how an address comes: in one register or in two.
"""

from dataclasses import dataclass

FLAG_PROGRAMS = 256
"""Most programs of a call that raise a flag."""
WORDS = 1 << 16
"""Most words of a rank in a call."""
LARGEST_WORDS_BYTES = 128 * 1024
"""Most values of a rank that are sent as words; what is more takes blocks. Measured on two H200."""
MOST_JOINED_ROWS = 16
"""Most rows of a product that gathers its result itself. Measured on two H200: the products of a
layer take 73.6 us so with 8 rows, with gathers behind them 77.2; with 32 rows 104.6 and 99.0 us."""
MOST_WHOLE_WORDS = 1 << 18
"""Most logits of a rank that are gathered as they are, where parts of the vocabulary could leave
less. Measured on two H200, a head with its choice: 160 us so with 1 row and 164 otherwise, with 8
rows 176 and 168, with 128 rows 433 and 248."""
MISSING_VALUE = 0x7FFFFFFF
"""Stands where no word came in time: a number that is none, also as two of bfloat16."""

MAX_POLLS = 1 << 24
"""Of a wait for another rank: longer than one's host takes to launch a step, some ten seconds."""
BLOCK_BYTES = 1 << 24
"""Most bytes of a rank in a gather of a step; more rows take several."""

SEQUENCE_OFFSET = 64
"""Where the number of the last call stands in a mailbox, in bytes, and behind it its arrivals."""
_FLAGS_AT = 128
_WORDS_AT = _FLAGS_AT + FLAG_PROGRAMS * 8 * 4
_ALIGNMENT = 256

ADDRESS = {1: "mov.b64 {0}, {1};", 2: "mov.b64 {0}, {{{1}, {2}}};"}
"""An address of one register, or of two: the low half and the high one."""


@dataclass(frozen=True)
class BufferLayout:
    """The sizes of the mailboxes of ranks, the same for all and for every program.

    Attributes:
      ranks: How many there are: 2, 4 or 8.
      block_bytes: Most bytes of a rank in a call.

    Raises:
      ValueError: Of those that cannot be.
    """

    ranks: int
    block_bytes: int

    def __post_init__(self) -> None:
        if self.ranks not in (2, 4, 8):
            raise ValueError(f"ranks on GPUs must be 2, 4 or 8, got {self.ranks}")
        if self.block_bytes < 1 or self.block_bytes % _ALIGNMENT:
            raise ValueError(
                f"block_bytes must be a multiple of {_ALIGNMENT}, got {self.block_bytes}"
            )
        if self.bytes >= 1 << 31:
            raise ValueError(f"a mailbox must have less than 2 GiB, got {self.bytes} bytes")

    @property
    def blocks_at(self) -> int:
        """Byte offset of the blocks."""
        return _WORDS_AT + 2 * self.ranks * WORDS * 8

    @property
    def words_at(self) -> int:
        """Byte offset of the words."""
        return _WORDS_AT

    @property
    def flags_at(self) -> int:
        """Byte offset of the flags."""
        return _FLAGS_AT

    @property
    def bytes(self) -> int:
        """Bytes of a mailbox."""
        return self.blocks_at + 2 * self.ranks * self.block_bytes

    def fits(self, rows: int, share: int, item_bytes: int) -> bool:
        """Returns whether rows and their squares go in one call."""
        return rows * share * item_bytes * 5 // 4 + 1024 <= self.block_bytes

    def most_rows(self, row_bytes: int) -> int:
        """Returns the rows that fit in one call, at least one."""
        return max(1, self.block_bytes * 3 // 4 // row_bytes)


def device_mailbox_bytes(ranks: int) -> int:
    """Of a step's mailboxes, on each of so many GPUs.

    Raises:
      ValueError: There cannot be so many.
    """
    return BufferLayout(ranks, BLOCK_BYTES).bytes


@dataclass(frozen=True)
class PeerTimeout:
    """Rank that sent nothing in time.

    Attributes:
      rank: Whose values did not come.
      call: Which of a step's, from 0; in JAX the number of the call in the mailboxes' clock.
    """

    rank: int
    call: int

    @classmethod
    def read(cls, word: int) -> "PeerTimeout | None":
        """Decodes the error word of a mailbox; None if nothing was missing."""
        return cls((word & 15) - 1, word >> 4) if word else None


def is_joined(rows: int, columns: int, item_bytes: int, chunks: int) -> bool:
    """Whether a product gathers its result itself: columns, and as many floats as it has chunks."""
    words = rows * columns * item_bytes // 4
    is_whole = columns * item_bytes % 4 == 0
    return rows <= MOST_JOINED_ROWS and is_whole and words + rows * chunks <= WORDS


def send_text(registers: int) -> str:
    """Assembly: writes a word into a mailbox, and gives the value back.

    Operands: the value, the mailbox, the place in it in bytes, the number, and whether to do it.
    """
    address, value, place, number, is_one = _operands(1, registers, 1, 1, 1)
    return f"""{{ .reg .pred is_one; .reg .b32 bits; .reg .b64 box, at, word;
mov.b32 bits, {value}; {address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
mov.b64 word, {{bits, {number}}}; setp.ne.s32 is_one, {is_one}, 0;
@is_one st.relaxed.sys.global.b64 [at], word;
mov.b32 $0, bits; }}"""


def receive_text(registers: int, pack: int) -> str:
    """Assembly: waits for some words of a mailbox at once, and gives their values.

    Operands, each `pack` times: the mailbox, the place in bytes, the number, how often to look, 0
    where no word is waited for, what is written as an error, and what was sent, which is not read.
    A word that does not come in time is `MISSING_VALUE`.
    """
    regs = [f"${pack + i}" for i in range(pack * (registers + 5))]
    boxes = [regs[i : registers * pack : pack] for i in range(pack)]
    places, numbers, looks, codes, _ = (
        regs[(registers + k) * pack : (registers + k + 1) * pack] for k in range(5)
    )
    head = [
        "{ .reg .pred is_all, has_more, is_same;",
        ".reg .b64 box;",
        ".reg .b32 looked, most, old;",
    ]
    first, look, check, last = [], [], [], []
    for i in range(pack):
        head.append(
            f".reg .pred come{i}; .reg .b64 at{i}, word{i}; .reg .b32 bits{i}, got{i}, told{i};"
        )
        first += [
            ADDRESS[registers].format("box", *boxes[i]),
            f"cvt.u64.u32 at{i}, {places[i]}; add.u64 at{i}, at{i}, box;",
            f"mov.b64 word{i}, 0; mov.b32 bits{i}, {MISSING_VALUE}; "
            f"setp.le.s32 come{i}, {looks[i]}, 0;",
            f"mov.s32 most, {looks[i]};" if i == 0 else f"max.s32 most, most, {looks[i]};",
        ]
        look.append(f"@!come{i} ld.relaxed.sys.global.b64 word{i}, [at{i}];")
        check += [
            f"mov.b64 {{got{i}, told{i}}}, word{i}; setp.eq.s32 is_same, told{i}, {numbers[i]};",
            f"@is_same mov.b32 bits{i}, got{i}; or.pred come{i}, come{i}, is_same;",
        ]
        last.append(f"mov.b32 ${i}, bits{i};")
    every = [f"and.pred is_all, is_all, come{i};" for i in range(1, pack)]
    return "\n".join(
        [
            *head,
            *first,
            "mov.u32 looked, 0;",
            "LOOK: mov.pred is_all, come0;",
            *every,
            "@is_all bra DONE; setp.lt.s32 has_more, looked, most; @!has_more bra LATE;",
            *look,
            *check,
            "add.s32 looked, looked, 1; bra LOOK;",
            f"LATE: atom.relaxed.sys.global.cas.b32 old, [box], 0, {codes[0]};",
            "DONE:",
            *last,
            "}",
        ]
    )


def store_block_ptx(registers: int) -> str:
    """Assembly: stores four bytes of a block, and gives them back. Operands as of a word's."""
    address, value, place, _, is_one = _operands(1, registers, 1, 1, 1)
    return f"""{{ .reg .pred is_one; .reg .b32 bits; .reg .b64 box, at;
mov.b32 bits, {value}; {address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
setp.ne.s32 is_one, {is_one}, 0; @is_one st.global.b32 [at], bits;
mov.b32 $0, bits; }}"""


def set_flag_ptx(registers: int) -> str:
    """Assembly: raises a program's flag, after all that the program has stored.

    All threads of a program must run it as often. Operands: what was stored, which is not read, the
    mailbox, the place, the number, and whether this thread writes.
    """
    address, stored, place, number, is_one = _operands(1, registers, 1, 1, 1)
    return f"""{{ .reg .pred is_one; .reg .b64 box, at;
{address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
bar.sync 0; setp.ne.s32 is_one, {is_one}, 0;
@is_one st.release.sys.global.u32 [at], {number};
mov.b32 $0, {stored}; }}"""


def wait_flag_ptx(registers: int) -> str:
    """Assembly: waits for a flag; 1 where it was raised in time, else 0.

    A flag of a later call counts too. Operands: the mailbox, the place, the number, how often to
    look, what is written as an error, and what was sent, which is not read.
    """
    address, place, number, looks, code, _ = _operands_of_look(registers)
    return f"""{{ .reg .pred come, has_more; .reg .b64 box, at; .reg .b32 seen, looked, old;
{address} cvt.u64.u32 at, {place}; add.u64 at, at, box; mov.b32 $0, 0;
setp.le.s32 come, {looks}, 0; @come bra DONE; mov.u32 looked, 0;
LOOK: ld.acquire.sys.global.u32 seen, [at];
sub.s32 seen, seen, {number}; setp.ge.s32 come, seen, 0; @come bra CAME;
add.s32 looked, looked, 1; setp.lt.s32 has_more, looked, {looks}; @has_more bra LOOK;
atom.relaxed.sys.global.cas.b32 old, [box], 0, {code}; bra DONE;
CAME: mov.b32 $0, 1;
DONE: }}"""


def load_block_ptx(registers: int) -> str:
    """Assembly: four bytes of a block whose flag was raised, else `MISSING_VALUE`.

    Operands: the mailbox, the place, and whether to read.
    """
    names = [f"${1 + i}" for i in range(registers + 2)]
    address = ADDRESS[registers].format("box", *names[:registers])
    place, is_one = names[registers:]
    return f"""{{ .reg .pred is_one; .reg .b64 box, at;
{address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
setp.ne.s32 is_one, {is_one}, 0; mov.b32 $0, {MISSING_VALUE};
@is_one ld.relaxed.sys.global.b32 $0, [at]; }}"""


def count_text(registers: int) -> str:
    """Assembly: counts the programs of a call that have read the clock, and gives its number back.

    The last one sets the clock. All threads of a program must run it, once. Operands: the number,
    the mailbox, the place of the clock, and how many programs the call has.
    """
    names = [f"${1 + i}" for i in range(registers + 3)]
    number, address = names[0], ADDRESS[registers].format("box", *names[1 : 1 + registers])
    place, programs = names[1 + registers :]
    return f"""{{ .reg .pred is_one; .reg .b64 box, at; .reg .b32 thread, come;
{address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
bar.sync 0; mov.u32 thread, %tid.x; setp.ne.u32 is_one, thread, 0; @is_one bra DONE;
atom.acq_rel.gpu.global.add.u32 come, [at+4], 1; add.u32 come, come, 1;
setp.ne.u32 is_one, come, {programs}; @is_one bra DONE;
st.relaxed.gpu.global.u32 [at+4], 0; st.relaxed.gpu.global.u32 [at], {number};
DONE: mov.b32 $0, {number}; }}"""


def constraints(results: int, *kinds: str) -> str:
    """Of an instruction's operands: `r` for 32 bits, `l` for 64."""
    return ",".join(["=r"] * results + list(kinds))


def _operands(values: int, registers: int, *rest: int) -> tuple[str, ...]:
    """The text that makes the address, then the names of the other operands in order."""
    del values, rest
    names = [f"${1 + i}" for i in range(1 + registers + 3)]
    address = ADDRESS[registers].format("box", *names[1 : 1 + registers])
    place, number, is_one = names[1 + registers :]
    return address, names[0], place, number, is_one


def _operands_of_look(registers: int) -> tuple[str, ...]:
    names = [f"${1 + i}" for i in range(registers + 5)]
    return ADDRESS[registers].format("box", *names[:registers]), *names[registers:]
