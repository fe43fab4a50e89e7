"""Why a text cannot go on by its grammar: sentences that a request is told."""

TOO_MUCH = "the grammar takes too much work at this place of the text; simplify it"
NO_TOKEN = "the grammar asks for a text that the model's tokens cannot write; change it"
OF_THE_REQUEST = (TOO_MUCH, NO_TOKEN)
"""What another grammar would mend; every other fault is the server's."""

BROKEN = "a token was chosen that the grammar of this request does not allow"
UNFOLLOWED = "the grammar's library cannot go on at this place of the text"
