"""N-gram drafting on the host: a trie of seen tokens, suffix automata of corpora, and draft
trees.
"""
