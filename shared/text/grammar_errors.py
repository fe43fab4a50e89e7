"""Messages of requests whose output cannot continue by its grammar."""

TOO_MUCH = "the grammar exceeds its work limit at this position of the output; simplify it"
NO_TOKEN = "the grammar requires text that the model's tokens cannot write; change it"
OF_THE_REQUEST = (TOO_MUCH, NO_TOKEN)
"""Faults that another grammar avoids; other faults are internal errors."""

BROKEN = "a token was selected that the grammar of this request does not allow"
UNFOLLOWED = "the grammar library failed at this position of the output"
