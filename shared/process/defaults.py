"""Options that the startup selects from the model and other flags.

Each selection is reported with its reason; values from the command line are never changed.
"""

from collections.abc import Callable
from dataclasses import replace

from shared.models.sentence_list import sentence_list
from shared.options.engine import LLGUIDANCE
from shared.options.flags import AUTO, NONE, ConfigError, spelling
from shared.options.options import Options
from shared.options.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from shared.process.grammars import GrammarQueue
from shared.text.call_formats.harmony import FORMAT as HARMONY_FORMAT
from shared.text.call_formats.registry import FORMATS
from shared.text.chat_templates import ChatTemplates
from shared.text.template_probe import ParserChoice, reasoning_parser_of, tool_call_parser_of
from shared.text.tokenizer import Tokenizer
from shared.text.tokenizer_files import TokenizerFiles

CHANNELS = HARMONY_FORMAT.name
_PARSERS = (
    ("reasoning_parser", reasoning_parser_of, REASONING_PARSERS),
    ("tool_call_parser", tool_call_parser_of, TOOL_CALL_PARSERS),
)


def with_parsers(options: Options, files: TokenizerFiles) -> Options:
    """Selects the parsers that match the chat template.

    Args:
      options: Options of the server.
      files: Tokenizer files of the model.

    Raises:
      ValueError: The tokenizer or a template cannot be read.
    """
    path = options.model.chat_template
    tokenizer = Tokenizer.from_files(files, chat_template=path)
    if path is not None and tokenizer is None:
        raise ConfigError(
            f"--chat-template {path} requires tokenizer.json in the model folder; add it, "
            "or remove the flag"
        )
    templates = None if tokenizer is None else tokenizer.templates
    for name, find, known in _PARSERS:
        options = _with_parser(options, templates, name, find, known)
    _check_channels(options)
    if tokenizer is not None:
        _check_tags(options.server.tool_call_parser, tokenizer)
    return options


def _check_channels(options: Options) -> None:
    """Raises if one parser alone reads channels, which separate reasoning, calls and content."""
    calls, reasoning = options.server.tool_call_parser, options.server.reasoning_parser
    of_calls, of_reasoning = calls == CHANNELS, reasoning == CHANNELS
    if of_calls != of_reasoning and (of_calls or calls is not None):
        raise ConfigError(
            f"--tool-call-parser {calls or NONE} and --reasoning-parser {reasoning or NONE} are "
            f"incompatible, because {CHANNELS} reads both; give {CHANNELS} to both, or to neither"
        )


def _check_tags(parser: str | None, tokenizer: Tokenizer) -> None:
    """Raises for tags that the tokenizer cannot represent, so that no output has them."""
    marks = () if parser is None else FORMATS[parser].marks
    if unknown := [mark for mark in marks if not tokenizer.can_represent(mark)]:
        raise ConfigError(
            f"--tool-call-parser {parser} requires a tokenizer that represents {unknown[0]}, which "
            "the tokenizer of the model changes; give another parser, or none"
        )


def _with_parser(
    options: Options,
    templates: ChatTemplates | None,
    name: str,
    find: Callable[[ChatTemplates], ParserChoice],
    known: tuple[str, ...],
) -> Options:
    given, reasons = getattr(options.server, name), options.reasons
    parser = None if given == NONE else given
    if given == AUTO:
        choice = ParserChoice(None) if templates is None else find(templates)
        parser = choice.parser
        if choice.candidates:
            raise ConfigError(
                f"{spelling(name)} auto is ambiguous: the chat template {choice.reason}; give "
                f"{spelling(name)} {' or '.join(choice.candidates)}"
            )
        if parser is not None:
            reasons += (f"{spelling(name)} {parser}: the chat template {choice.reason}",)
        elif choice.reason:
            way_out = f"give {spelling(name)} ({sentence_list(known)}) to choose one"
            reasons += (f"{spelling(name)} none: the chat template {choice.reason}; {way_out}",)
    server = replace(options.server, **{name: parser})
    return replace(options, server=server, reasons=reasons)


def with_grammars(
    options: Options, vocab: int, files: TokenizerFiles
) -> tuple[Options, GrammarQueue | None]:
    """Selects the grammar backend, and creates the grammar compiler if there is one.

    Args:
      options: Options of the server.
      vocab: Vocabulary size of the model.
      files: Tokenizer files of the model.

    Raises:
      ValueError: The flags require grammars, and the model's tokenizer does not support them.
    """
    if options.engine.grammar_backend != AUTO:
        return options, GrammarQueue.of_options(options, vocab, files)
    reason = _reason_against(options)
    if reason is None:
        chosen = _with_backend(options, LLGUIDANCE)
        try:
            return chosen, GrammarQueue.of_options(chosen, vocab, files)
        except ValueError as error:
            reason = str(error)
    told = f"--grammar-backend none: {reason}; requests with structured output are rejected"
    chosen = _with_backend(options, NONE)
    return replace(chosen, reasons=(*options.reasons, told)), None


def _reason_against(options: Options) -> str | None:
    """Returns the reason why other flags exclude structured output; None if they do not."""
    draft = options.speculative
    if draft.verification != "exact":
        return "--speculative-accept-rule rejection does not support grammars"
    if draft.accept_rates is not None:
        return "--speculative-simulate-accept-length ignores grammars"
    return None


def _with_backend(options: Options, backend: str) -> Options:
    return replace(options, engine=replace(options.engine, grammar_backend=backend))
