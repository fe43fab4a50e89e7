"""HELP texts of `/metrics`: meaning, unit and labels of each metric, by its name without prefix."""

HELP = {
    # Requests.
    "num_requests_running": "Requests that have a state slot: in prefill or decode.",
    "num_requests_waiting": "Requests in the queue, without KV pages or a state slot.",
    "num_preemptions_total": "Requests that gave up their KV pages and were queued again.",
    "request_success_total": "Requests that ended, by finished_reason; abort and error included.",
    "time_to_first_token_seconds": "Seconds from the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Seconds between two steps that gave a choice tokens, "
    "however many each gave.",
    "e2e_request_latency_seconds": "Seconds from the arrival of a request to its end; without "
    "requests that were aborted or failed.",
    "request_prompt_tokens": "Tokens of all prompts of a request, each prompt counted once.",
    "request_generation_tokens": "Tokens of all choices of a request.",
    # Tokens.
    "prompt_tokens_total": "Tokens of prompts, those found in the prefix cache included.",
    "generation_tokens_total": "Tokens of all outputs.",
    "prompt_image_tokens_total": "Tokens of prompts in whose place images stand.",
    "late_rows_total": "Rows of steps whose request had ended before the step did; their tokens "
    "are dropped.",
    # Memory and prefix cache.
    "kv_cache_usage_perc": "Share of the KV pages that running requests hold, from 0 to 1.",
    "kv_pages_free": "KV pages that are free or can be evicted at once.",
    "state_slots_free": "State slots, one for each running request, that are free.",
    "prefix_cache_pages": "KV pages in the prefix cache.",
    "prefix_cache_states": "Snapshots of recurrent states in the prefix cache.",
    "prefix_cache_queries_total": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_cache_hits_total": "Tokens of prompts that were found in the prefix cache.",
    "pictures_encoded_total": "Images that the vision encoder has encoded, repeated ones included.",
    "picture_rows_held": "Image tokens whose embeddings the encoder cache holds.",
    # Steps.
    "engine_steps_total": "Steps that were submitted to the device, by kind and by launch, the way "
    "in which they were launched.",
    "engine_plain_operations": "Device programs that run operation op without a kernel.",
    "ranks": "Ranks that run the model together.",
    "rank_steps_total": "Steps that a rank has ended.",
    "rank_free_bytes_at_start": "Bytes of device memory that were free when a rank started.",
    # Speculative decoding.
    "spec_decode_num_drafts_total": "Draft trees that were verified, one a request and step.",
    "spec_decode_num_draft_tokens_total": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens_total": "Draft tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos_total": "Draft tokens that were accepted, by position "
    "in the draft, from 0.",
    "spec_decode_simulated_accept_length": "Tokens per step of simulated acceptance, as the flag "
    "sets it.",
    "spec_decode_adaptive_draft_tokens": "Draft tokens of the draft shape of the last step.",
    "spec_decode_adaptive_steps_total": "Decode steps, by the tier of their draft shape; asleep is "
    "plain decoding while n-gram drafts are disabled.",
    "spec_decode_adaptive_step_seconds": "Seconds of a decode step as estimated, by batch, tier.",
    "spec_decode_joined_steps_total": "Decode steps of merged draft trees, by kind: the sources of "
    "their draft tokens.",
    "spec_decode_source_draft_tokens_total": "Draft tokens that were verified, by source.",
    "spec_decode_source_accepted_tokens_total": "Draft tokens that were accepted, by source.",
    "ngram_rows_total": "Draft trees that were made of n-grams, empty ones included.",
    "ngram_rows_without_match_total": "Draft trees for which no n-gram was found.",
    "ngram_seen_ngrams": "N-grams that are stored.",
    "ngram_corpora": "External corpora that are stored.",
    "ngram_corpus_tokens": "Tokens of all external corpora.",
    # Comparison with plain decoding, --shadow-verify-rate.
    "parity_checks_total": "Outputs that were compared with plain decoding.",
    "parity_mismatch_total": "Outputs that differed from plain decoding.",
    "parity_dropped_total": "Outputs that were chosen for comparison and given up, since too many "
    "waited or requests interrupted them too often.",
    "parity_steps_total": "Steps that compared outputs with plain decoding.",
    "parity_skipped_total": "Outputs that cannot be compared with plain decoding, by reason.",
    "parity_checks_waiting": "Outputs that wait for their comparison with plain decoding, or are "
    "being compared.",
}
