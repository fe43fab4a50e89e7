"""torch with ranks on GPUs, which a server refuses so far.

Their steps have not been compared with those of one GPU; this is for tests and benches, which do.
The processes of other ranks start from this module, too.
"""

from dataclasses import replace

from torch_impl import platform

PLATFORM = replace(platform.PLATFORM, ranks_on_gpus=True)
