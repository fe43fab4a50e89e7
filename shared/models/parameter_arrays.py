"""Slices of arrays: the part of a checkpoint tensor, and the TP shard of a parameter."""

import numpy as np
from jaxtyping import Int, Shaped

from shared.models.parameter import CheckpointTensor, Parameter

Array = Shaped[np.ndarray, "..."]


def slice_tensor(tensor: CheckpointTensor, values: Array) -> Array:
    """Returns the slice of a tensor's values."""
    if tensor.ranges is None:
        return values
    return np.concatenate([values[tensor.index(run)] for run in tensor.ranges], tensor.axis)


def unsliced(tensor: CheckpointTensor, values: Array) -> Array:
    """Returns all values of a tensor in the order of the file; its slice has every output once."""
    if tensor.ranges is None:
        return values
    order = np.concatenate([np.arange(first, end) for first, end in tensor.ranges])
    return np.take(values, np.argsort(order), tensor.axis)


def from_stored(tensor: CheckpointTensor, values: Array) -> Array:
    """Returns values of an unquantised file, with all outputs, in the order of the tensor."""
    return in_halves(tensor, values.swapaxes(-1, -2) if tensor.is_transposed else values)


def in_halves(tensor: CheckpointTensor, values: Array) -> Array:
    """Returns values with all outputs on axis 1, with gate outputs before up outputs."""
    if not tensor.is_interleaved:
        return values
    return np.concatenate([values[:, ::2], values[:, 1::2]], axis=1)


def to_stored(tensor: CheckpointTensor, values: Array) -> Array:
    """Returns the values of a whole tensor in the order of an unquantised file."""
    if tensor.is_interleaved:
        values = np.stack(np.split(values, 2, axis=1), axis=2).reshape(values.shape)
    return values.swapaxes(-1, -2) if tensor.is_transposed else values


def shard_outputs(parameter: Parameter) -> Int[np.ndarray, " outputs"]:
    """Returns the indices of a shard's outputs in the whole parameter, without padding outputs."""
    return np.concatenate([np.arange(first, end) for first, end in parameter.runs])


def shard_array(parameter: Parameter, array: Array) -> Array:
    """Returns the shard of a whole array."""
    if parameter.whole is None:
        return array
    found = np.take(array, shard_outputs(parameter), parameter.axis)
    spare = [(0, 0)] * array.ndim
    spare[parameter.axis] = (0, parameter.shape[parameter.axis] - found.shape[parameter.axis])
    return np.pad(found, spare)
