"""Steps that make the rows of a picture."""

import torch

from shared.boundary.program import Program
from torch_impl import tower
from torch_impl.device_state import Fields, Plan
from torch_impl.machine import Machine


def encode(machine: Machine, plan: Plan, program: Program) -> Fields:
    """Writes a picture's rows into the pool; those of its padding go to the sink."""
    picture, held, pictures = plan.picture, machine.state.pictures, machine.capacity.pictures
    assert picture is not None  # an encoding has one
    assert held is not None  # and a model that sees
    assert pictures is not None
    assert machine.tower is not None
    vision = pictures.vision
    patches = tower.patches(vision, picture.pixels)
    rows = tower.encoded(vision, machine.tower, patches)
    number = torch.arange(len(rows), device=rows.device)
    is_real = number * vision.merged < patches.count
    place = torch.where(is_real & (picture.place > 0), picture.place + number, 0)
    held.pool[place] = rows
    return {"counts": torch.zeros_like(plan.save_at)}
