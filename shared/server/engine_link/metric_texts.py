"""HELP texts of `/metrics`: meaning, unit and labels of each metric, by its name without prefix."""

HELP = {
    # Requests.
    "num_requests_running": "Running requests, in prefill or decode.",
    "num_requests_waiting": "Queued requests, without KV pages or a slot.",
    "num_preemptions_total": (
        "Preemptions: requests that released their KV pages and were queued again."
    ),
    "request_success_total": "Requests that ended, by finished_reason; abort and error included.",
    "time_to_first_token_seconds": "Seconds from the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Seconds between two steps that produced tokens of a choice, "
    "whatever their number.",
    "e2e_request_latency_seconds": "Seconds from the arrival of a request to its end; without "
    "requests that were aborted or failed.",
    "request_prompt_tokens": "Tokens of all prompts of a request, each prompt counted once.",
    "request_generation_tokens": "Tokens of all choices of a request.",
    "malformed_tool_calls_total": "Tool calls that were returned as text, in whole or in part, "
    "because they are invalid in their format, by format.",
    # Tokens.
    "prompt_tokens_total": "Tokens of prompts, those found in the prefix cache included.",
    "generation_tokens_total": "Tokens of all outputs.",
    "prompt_image_tokens_total": "Image tokens of prompts.",
    "overlap_stale_rows_total": "Rows of in-flight steps for requests that had already finished; "
    "their tokens are dropped.",
    # Memory and prefix cache.
    "kv_cache_usage_perc": ("Fraction of the KV pages that running requests hold, from 0 to 1."),
    "kv_pages_free": "KV pages that are free or can be evicted at once.",
    "request_slots_free": "Free request slots; each running request holds one.",
    "prefix_cache_pages": "KV pages in the prefix cache.",
    "prefix_cache_state_snapshots": "Snapshots of recurrent states in the prefix cache.",
    "prefix_cache_queries_total": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_cache_hits_total": "Tokens of prompts that were found in the prefix cache.",
    "mm_encoder_images_total": "Images that the vision encoder has encoded, repeated ones "
    "included.",
    "mm_encoder_cache_tokens": "Image tokens with embeddings in the encoder cache.",
    # Steps.
    "engine_steps_total": "Submitted device steps, by kind and by launch mode.",
    "engine_fallback_ops": (
        "Compiled programs in which operation op uses the reference implementation."
    ),
    "tp_size": "Tensor-parallel ranks that run the model.",
    "tp_rank_steps_total": "Steps that a rank has finished.",
    "tp_rank_startup_free_bytes": "Bytes of free device memory at startup of a rank.",
    # Speculative decoding.
    "spec_decode_num_drafts_total": "Draft trees that were verified, one a request and step.",
    "spec_decode_num_draft_tokens_total": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens_total": "Draft tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos_total": "Draft tokens that were accepted, by position "
    "in the draft, from 0.",
    "spec_decode_simulated_accept_length": "Tokens per step of simulated acceptance, as the flag "
    "sets it.",
    "spec_decode_adaptive_draft_tokens": "Draft tokens of the draft shape of the last step.",
    "spec_decode_adaptive_steps_total": "Decode steps, by the tier of their draft shape; none is "
    "plain decoding, disabled plain decoding while n-gram drafts are switched off.",
    "spec_decode_adaptive_step_seconds": "Seconds of a decode step as estimated, by batch, tier.",
    "spec_decode_merged_steps_total": "Decode steps of merged drafting, by the source of their "
    "draft tokens: model, ngram, merged (both) or none.",
    "spec_decode_source_draft_tokens_total": "Draft tokens that were verified, by source.",
    "spec_decode_source_accepted_tokens_total": "Draft tokens that were accepted, by source.",
    "ngram_lookups_total": "Lookups of n-gram drafts, by result: hit or miss.",
    "ngram_index_entries": "N-grams that are stored.",
    "ngram_corpora": "External corpora that are stored.",
    "ngram_corpus_tokens": "Tokens of all external corpora.",
    # LoRA.
    "lora_adapters": "LoRA adapters that requests may name.",
    "lora_loads_total": "Loads of LoRA adapters into slots of device memory.",
    "lora_requests_total": "Requests of a LoRA adapter that ended, by lora_name; other: all "
    "adapters after the first 64.",
    "lora_spec_decode_num_draft_tokens_total": "Draft tokens that were verified, by lora_name.",
    "lora_spec_decode_num_accepted_tokens_total": "Draft tokens that were accepted, by lora_name.",
    # Disaggregated prefill, --disaggregation-mode.
    "kv_transfer_records_total": "Transferred KV cache records, by direction (sent or received) "
    "and backend.",
    "kv_transfer_bytes_total": "Bytes of transferred KV cache records, by direction and backend.",
    "kv_transfer_seconds_total": "Seconds of the transfers of KV cache records, without the "
    "prefill, by direction and backend.",
    "kv_transfer_failures_total": "Transfers without a result, by reason; the prompt is prefilled "
    "locally then.",
    "kv_transfer_exported_tokens_total": "Tokens of exported KV cache records.",
    "kv_transfer_imported_tokens_total": "Tokens of imported KV cache records, those that were "
    "cached already included.",
    "kv_transfer_held_records": "KV cache records that other servers have not fetched yet.",
    "kv_transfer_held_bytes": "Bytes of these records.",
    "kv_transfer_waiting_requests": "Requests that wait for the KV cache of their prompt.",
    "kv_transfer_received_bytes": "Bytes of received KV cache records that are not imported yet.",
    # Shadow verification, --shadow-verify-rate.
    "shadow_verify_requests_total": "Requests selected for shadow verification, by result: match, "
    "mismatch, dropped (queue full or interrupted too often) or skipped (not comparable).",
    "shadow_verify_skipped_total": "Skipped requests of shadow verification, by reason.",
    "shadow_verify_steps_total": "Steps of shadow verification.",
    "shadow_verify_requests_waiting": "Requests queued for shadow verification or being verified.",
}
