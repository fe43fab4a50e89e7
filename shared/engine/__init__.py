"""Engine core on the host: requests, KV pages, scheduler, plans; numpy and the standard library
only.
"""
