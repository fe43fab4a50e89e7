"""Check of sizes that must divide into groups."""


def check_groups(names: tuple[str, str], heads: int, groups: int) -> None:
    """Checks that heads divide evenly into groups; `names` are the fields in the message."""
    if heads % groups:
        raise ValueError(f"{names[0]} ({heads}) must be a multiple of {names[1]} ({groups})")
