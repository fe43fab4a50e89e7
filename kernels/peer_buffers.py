"""Layout and PTX of the symmetric buffers through which ranks on the GPUs of one host all-gather.

Each rank has a buffer in its GPU's memory, into which all ranks store their shards. Addresses are
known at run time only. Data is sent with the sequence number of the call, so no buffer is ever
cleared:

    head | flags [programs, ranks] | words [2, ranks, WORDS] | blocks [2, ranks, bytes]

Small messages use the LL protocol: four bytes of data and the sequence number form one 8-byte word,
which is stored and loaded at once. A word has arrived if its sequence number is that of the call.
Large messages use the flag protocol: data is stored as blocks, and then each program sets a flag.

Words and blocks have two copies, for even and odd sequence numbers. A rank that sends in call n + 2
has received, in call n + 1, data that each other rank sent after its own call n. Every call
therefore sends to all ranks and receives from all ranks.

The head has an error word and, in JAX, the sequence number. A torch kernel receives the index of
its call as an argument. JAX has no such argument, because equal layers are traced once and XLA
orders the calls. All ranks run one program, so the order is the same on every rank. There, all
programs of a kernel load the sequence number, and the last of them stores the next one.

The PTX of both languages is the same, except that an address is in one register or in two.
"""

from dataclasses import dataclass

FLAG_PROGRAMS = 256
"""Maximum number of programs of a call that set a flag."""
WORDS = 1 << 16
"""Maximum number of words of a rank in a call."""
LARGEST_WORDS_BYTES = 128 * 1024
"""Maximum bytes of a rank for the LL protocol; larger messages are blocks. Measured on 2 H200."""
MOST_JOINED_ROWS = 16
"""Maximum rows of a GEMM with a fused all-gather. Measured on 2 H200, GEMMs of a layer: 73.6 us
fused and 77.2 us with separate all-gathers for 8 rows, 104.6 us and 99.0 us for 32 rows."""
MOST_WHOLE_WORDS = 1 << 18
"""Maximum logits of a rank that are gathered whole, and not reduced to candidates of its vocabulary
shard first. Measured on 2 H200, LM head and sampling: 160 us whole and 164 us reduced for 1 row,
176 us and 168 us for 8 rows, 433 us and 248 us for 128 rows."""
MISSING_VALUE = 0x7FFFFFFF
"""Value in place of a word that did not arrive in time: NaN as float32 and as two bfloat16."""

MAX_POLLS = 1 << 24
"""Maximum polls for data of another rank: about ten seconds, longer than a host launches a step."""
BLOCK_BYTES = 1 << 24
"""Maximum bytes of a rank in one all-gather of a step; more rows take several all-gathers."""

SEQUENCE_OFFSET = 64
"""Byte offset of the last call's sequence number in a buffer; its arrival counter follows."""
_FLAGS_AT = 128
_WORDS_AT = _FLAGS_AT + FLAG_PROGRAMS * 8 * 4
_ALIGNMENT = 256

ADDRESS = {1: "mov.b64 {0}, {1};", 2: "mov.b64 {0}, {{{1}, {2}}};"}
"""PTX that loads an address from one register, or from two: the low and the high half."""


@dataclass(frozen=True)
class BufferLayout:
    """Sizes of the symmetric buffers, equal on all ranks and for every program.

    Attributes:
      ranks: Number of ranks: 2, 4 or 8.
      block_bytes: Maximum bytes of a rank in a call.

    Raises:
      ValueError: The number of ranks or the size is not supported.
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
            raise ValueError(
                f"a symmetric buffer must be smaller than 2 GiB, got {self.bytes} bytes"
            )

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
        """Bytes of a symmetric buffer."""
        return self.blocks_at + 2 * self.ranks * self.block_bytes

    def fits(self, rows: int, share: int, item_bytes: int) -> bool:
        """Returns whether rows and their sums of squares fit in one call.

        Args:
          rows: Number of rows.
          share: Columns of a rank's shard.
          item_bytes: Bytes of an element.
        """
        return rows * share * item_bytes * 5 // 4 + 1024 <= self.block_bytes

    def max_rows(self, row_bytes: int) -> int:
        """Returns the number of rows of `row_bytes` bytes that fit in one call, at least one."""
        return max(1, self.block_bytes * 3 // 4 // row_bytes)


def symmetric_buffer_bytes(ranks: int) -> int:
    """Returns the bytes of the symmetric buffer on each GPU of a step.

    Raises:
      ValueError: The number of ranks is not supported.
    """
    return BufferLayout(ranks, BLOCK_BYTES).bytes


@dataclass(frozen=True)
class PeerTimeout:
    """Rank whose data did not arrive in time.

    Attributes:
      rank: The rank whose data is missing.
      call: Index of the all-gather in the step, from 0; in JAX its sequence number.
    """

    rank: int
    call: int

    @classmethod
    def read(cls, word: int) -> "PeerTimeout | None":
        """Decodes the error word of a symmetric buffer; None if no data was missing."""
        return cls((word & 15) - 1, word >> 4) if word else None


def is_joined(rows: int, columns: int, item_bytes: int, chunks: int) -> bool:
    """Returns whether the all-gather of a GEMM is fused into its kernel.

    Args:
      rows: Rows of the result.
      columns: Outputs of this rank.
      item_bytes: Bytes of an output.
      chunks: Sums of squares per row that are gathered with the result, 4 bytes each.
    """
    words = rows * columns * item_bytes // 4
    is_whole = columns * item_bytes % 4 == 0
    return rows <= MOST_JOINED_ROWS and is_whole and words + rows * chunks <= WORDS


def send_text(registers: int) -> str:
    """Returns PTX that stores a word in a symmetric buffer (LL protocol); its result is the value.

    Operands: the value, the buffer, the byte offset, the sequence number, and whether to store.

    Args:
      registers: Registers of an address.
    """
    address, value, place, number, is_one = _operands(1, registers, 1, 1, 1)
    return f"""{{ .reg .pred is_one; .reg .b32 bits; .reg .b64 box, at, word;
mov.b32 bits, {value}; {address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
mov.b64 word, {{bits, {number}}}; setp.ne.s32 is_one, {is_one}, 0;
@is_one st.relaxed.sys.global.b64 [at], word;
mov.b32 $0, bits; }}"""


def receive_text(registers: int, pack: int) -> str:
    """Returns PTX that polls some words of a symmetric buffer at once; its results are the values.

    Operands, each `pack` times: the buffer, the byte offset, the sequence number, the maximum
    number of polls, the error word of a timeout, and the sent value. The sent value is not read,
    and orders the polls after the store. With 0 polls nothing is loaded. A word that does not
    arrive in time is `MISSING_VALUE`.

    Args:
      registers: Registers of an address.
      pack: Words that a thread polls at once.
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
    """Returns PTX that stores four bytes of a block; operands and result as for `send_text`."""
    address, value, place, _, is_one = _operands(1, registers, 1, 1, 1)
    return f"""{{ .reg .pred is_one; .reg .b32 bits; .reg .b64 box, at;
mov.b32 bits, {value}; {address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
setp.ne.s32 is_one, {is_one}, 0; @is_one st.global.b32 [at], bits;
mov.b32 $0, bits; }}"""


def set_flag_ptx(registers: int) -> str:
    """Returns PTX that sets a flag of a program, after all stores of the program.

    All threads of a program must execute it equally often. Operands: a stored value, the buffer,
    the byte offset, the sequence number, and whether this thread stores the flag. The result is
    the stored value, which only orders the flag after the store.
    """
    address, stored, place, number, is_one = _operands(1, registers, 1, 1, 1)
    return f"""{{ .reg .pred is_one; .reg .b64 box, at;
{address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
bar.sync 0; setp.ne.s32 is_one, {is_one}, 0;
@is_one st.release.sys.global.u32 [at], {number};
mov.b32 $0, {stored}; }}"""


def wait_flag_ptx(registers: int) -> str:
    """Returns PTX that polls a flag; its result is 1 if the flag was set in time, else 0.

    The flag of a later call counts too. Operands: the buffer, the byte offset, the sequence number,
    the maximum number of polls, the error word of a timeout, and the sent value, which is not read.
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
    """Returns PTX that loads four bytes of a block; its result is `MISSING_VALUE` without a load.

    Operands: the buffer, the byte offset, and whether to load.
    """
    names = [f"${1 + i}" for i in range(registers + 2)]
    address = ADDRESS[registers].format("box", *names[:registers])
    place, is_one = names[registers:]
    return f"""{{ .reg .pred is_one; .reg .b64 box, at;
{address} cvt.u64.u32 at, {place}; add.u64 at, at, box;
setp.ne.s32 is_one, {is_one}, 0; mov.b32 $0, {MISSING_VALUE};
@is_one ld.relaxed.sys.global.b32 $0, [at]; }}"""


def count_text(registers: int) -> str:
    """Returns PTX that counts the programs of a call that have loaded the sequence number.

    The last program stores the number of the call for the next one. All threads of a program must
    execute it, once. Operands: the number of the call, which is also the result, the buffer, the
    byte offset of the sequence number, and the number of programs of the call.
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
    """Returns the operand constraints of inline assembly: `r` for 32 bits, `l` for 64 bits."""
    return ",".join(["=r"] * results + list(kinds))


def _operands(values: int, registers: int, *rest: int) -> tuple[str, ...]:
    """Returns the PTX that loads the address, then the names of the other operands in order."""
    del values, rest
    names = [f"${1 + i}" for i in range(1 + registers + 3)]
    address = ADDRESS[registers].format("box", *names[1 : 1 + registers])
    place, number, is_one = names[1 + registers :]
    return address, names[0], place, number, is_one


def _operands_of_look(registers: int) -> tuple[str, ...]:
    names = [f"${1 + i}" for i in range(registers + 5)]
    return ADDRESS[registers].format("box", *names[:registers]), *names[registers:]
