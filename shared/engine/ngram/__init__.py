"""Drafts from text that was seen: a trie, suffix automata of corpora, and trees from both."""
