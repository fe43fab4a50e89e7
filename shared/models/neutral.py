"""Config fields that do not affect a forward pass, grouped by origin."""

from typing import Any

_WRITERS = {
    *("_name_or_path", "name_or_path", "_commit_hash", "auto_map", "transformers_version"),
    *("torch_dtype", "dtype", "head_dtype", "tokenizer_class", "unsloth_version", "unsloth_fixed"),
    *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
    *("_experts_implementation", "experts_implementation", "model_max_length", "max_seq_len"),
}
_TRAINING = {
    *("initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"),
    *("classifier_dropout", "output_router_logits", "router_aux_loss_coef", "pretraining_tp"),
    *("gradient_checkpointing", "use_cache"),
}
_OUTPUTS = {
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict", "return_dict_in_generate", "problem_type", "num_labels", "id2label"),
    *("label2id", "finetuning_task", "task_specific_params", "torchscript", "is_decoder"),
    *("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "prefix"),
    *("chunk_size_feed_forward", "pruned_heads", "tie_encoder_decoder", "use_bfloat16"),
    *("tf_legacy_loss", "remove_invalid_values"),
}
_TOKENS = {f"{name}_token_id" for name in ("bos", "eos", "pad", "sep", "decoder_start")}

GENERATION: dict[str, Any] = {
    "do_sample": True,
    "max_length": 20,
    "temperature": 1,
    "top_k": 50,
    "top_p": 1,
    "typical_p": 1,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "length_penalty": 1,
    "guidance_scale": 1,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    **dict.fromkeys(
        (
            *("max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
            *("early_stopping", "min_p", "top_h", "epsilon_cutoff", "eta_cutoff"),
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
            *("force_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
            *("forced_bos_token_id", "forced_eos_token_id", "diversity_penalty"),
            *("exponential_decay_length_penalty", "renormalize_logits", "constraints"),
            *("presence_penalty", "frequency_penalty", "penalty_alpha", "watermarking_config"),
        )
    ),
}
"""Fields that affect token selection, each with the neutral value besides null, false, 0 and empty.
`do_sample: false` requests greedy decoding."""

ASSISTED = {
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "is_assistant", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "assistant_early_exit", "cache_implementation", "cache_config"),
    *("compile_config", "disable_compile", "prefill_chunk_size", "low_memory"),
}
"""Fields that configure how transformers runs a generation, and change no token."""

WRITTEN = frozenset(_WRITERS | _TRAINING | _OUTPUTS | _TOKENS | ASSISTED)
"""Fields about how a model was trained and saved, and about extra outputs of transformers."""

NEUTRAL = WRITTEN | GENERATION.keys()
"""All fields that do not affect a forward pass."""
