"""What the text encoder reads of a prompt: which learned words, and what its limit cuts off."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icom.errors import UsageError
from icom.methods.embedding import suggestion
from icom.methods.embedding_file import Word

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

_LIKE_A_WORD = re.compile(r"<[^<>\s]+>|\bembedding:\S+")
"""How learned words look: in diffusers' examples and here; in ComfyUI."""


def as_taught(prompt: str, words: Sequence[Word]) -> str:
    """The prompt with the words in the case they were learned in: only then does diffusers put all their rows in."""
    for word in words:
        prompt = word.token.join(re.split(re.escape(word.token), prompt, flags=re.IGNORECASE))
    return prompt


def check_prompts(
    tokenizer: CLIPTokenizer, prompts: Sequence[str], negative_prompt: str | None, words: Sequence[Word]
) -> list[str]:
    """Prove that the learned words reach the text encoder.

    Args:
        tokenizer: knows the words' tokens; its `model_max_length` is the encoder's context.
        prompts: as they are drawn.
        negative_prompt: None where it has no effect.
        words: of --embedding.

    Returns:
        Warnings: text that is cut off, and prompts without any of the words.

    Raises:
        UsageError: a word is in no prompt, is cut off, or read inside another word; or a prompt has a word that
            nothing teaches.
    """
    warnings: list[str] = []
    read = [_learned_tokens(tokenizer, prompt, warnings) for prompt in prompts]
    by_negative = _learned_tokens(tokenizer, negative_prompt or "", warnings)
    said = by_negative.union(*read)
    of_use = {word.path for word in words if word.token in said}
    for word in words:
        if word.path not in of_use:  # of a file with several words, one is enough
            raise UsageError(
                f"{word.path} teaches {word.token}, and no prompt says it: it would have no effect. Write it as it "
                f'stands here, as in --prompt "a photo of {word.token}", or drop that --embedding.'
            )
    tokens = {word.token for word in words}
    if tokens and not tokens & by_negative:
        warnings += [
            f"the prompt {prompt!r} says none of the learned words: --embedding has no effect on it."
            for prompt, learned in zip(prompts, read, strict=True)
            if not tokens & learned
        ]
    return warnings


def _learned_tokens(tokenizer: CLIPTokenizer, prompt: str, warnings: list[str]) -> set[str]:
    """The learned tokens that the text encoder gets of a prompt; what is cut off is added to the warnings."""
    from diffusers.loaders import TextualInversionLoaderMixin

    special = tokenizer.all_special_tokens
    taught = {i: token for token, i in tokenizer.get_added_vocab().items() if token not in special}
    rest = prompt
    for token in sorted(taught.values(), key=len, reverse=True):  # which may have what looks like a word in it
        rest = rest.replace(token, " ")
    for word in _LIKE_A_WORD.findall(rest):
        if len(tokenizer.encode(word, add_special_tokens=False)) != 1:
            raise UsageError(
                f"The prompt {prompt!r} says {word}, which nothing teaches: it would have no effect. Name its file "
                "with --embedding, or leave it out."
            )
    text = TextualInversionLoaderMixin().maybe_convert_prompt(prompt, tokenizer)
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids, spans = encoded.input_ids, encoded.offset_mapping
    for token_id, (start, end) in zip(ids, spans, strict=True):
        if token_id in taught and (_joined(text, start) or _joined(text, end)):
            raise UsageError(
                f"In the prompt {prompt!r} the learned word {taught[token_id]} is read inside another word. Name it "
                f"anew, as in --embedding FILE={suggestion(taught[token_id])}."
            )
    kept = tokenizer.model_max_length - 1  # and the mark of the end
    limit = f"The text encoder reads {kept - 1} tokens"
    lost = [taught[i] for i in ids if i in taught and i not in ids[:kept]]
    if lost:
        raise UsageError(
            f"{limit}, and {lost[0]} in the prompt {prompt!r} is beyond that: it would have no effect. Put it nearer "
            "to the beginning, or shorten the prompt."
        )
    if len(ids) > kept + 1:
        warnings.append(f"{limit}; of the prompt {prompt!r} this is left out: {text[spans[kept][0] :]!r}.")
    return {taught[i] for i in ids if i in taught}


def _joined(text: str, position: int) -> bool:
    """Whether a word goes on over this position."""
    return text[position - 1 : position].isalnum() and text[position : position + 1].isalnum()
