"""Spreading of a model's layers over several GPUs of one process, which then run one after the other.

Each device gets the same number of consecutive layers. The cache of a layer is on the device of the layer, so it is
spread as evenly as the weights. Hidden states are copied from one device to the next. The other inputs of the layers
(mask, rotary angles) are copied once per forward pass and device, not once per layer. accelerate is used only to load
checkpoints onto the devices, because its hooks would copy inputs before every linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.errors import ModelError
from kvbench.util.attachment import Placement, record_placement

#: function that copies tensors to a device, and returns the copies
Mover = Callable[[Sequence[Tensor], torch.device], list[Tensor]]


def balanced(model: Any, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Choose a device for each part of a model, so that each device gets an equal share of consecutive decoder layers.

    Modules before the layers (embedding, rotary angles) go to the first device, modules after them (norm, lm_head) to
    the last. An lm_head that shares the embedding's weights goes to the first device too. Nothing is moved yet; the
    model's parameters may be on any device, including ``meta``.

    Returns:
        A dict from module names to devices. Together, these modules cover the whole model.

    Raises:
        ModelError: the model has no list of decoder layers.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        raise ModelError(
            f"{type(model).__name__} does not have a list of its {count} decoder layers, so they cannot "
            "be spread over devices.\n  hint: set runtime.device_map=null to load the model onto one device"
        )
    layers, first, last = stacks[0], devices[0], devices[-1]
    if count < len(devices):
        last = devices[count - 1]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    where: dict[str, torch.device] = {}
    before = True
    for name, module in _model_parts(model, "", layers):
        if name == layers:
            before = False
            for index in range(count):
                where[f"{name}.{index}"] = devices[index * min(len(devices), count) // count]
        elif before or not any(True for _ in module.parameters()) or (module is head and tied):
            where[name] = first
        else:
            where[name] = last
    return where


def _model_parts(module: nn.Module, name: str, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield, in the model's order, the list of decoder layers (named `layers`) and the modules outside it."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if layers.startswith(path + "."):
            yield from _model_parts(child, path, layers)
        else:
            yield path, child


def random_spread(config: Any, dtype: torch.dtype, devices: Sequence[torch.device], seed: int) -> Any:
    """Return a causal LM with random parameters whose layers are spread over one or more devices.

    Modules are initialised one by one on the first device, and each is then moved to its own device. So no device ever
    holds more than its own modules and one other module. The parameters depend on the seed and on the type of the first
    device, not on the number of devices. For the same seed, they differ from those of
    :func:`kvbench.models.load.random_model`, because that function draws more random numbers.

    Raises:
        ModelError: the model has no list of decoder layers.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    where, home = balanced(model, devices), devices[0]
    with torch.random.fork_rng(devices=[home] if home.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for name, module in _bottom_up(model, ""):
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if own:
                module.to_empty(device=home, recurse=False)
                model._init_weights(module)
                _move(module, device_of_module(name, where))
    model.tie_weights()
    connect(model, where)
    return model.eval()


def _bottom_up(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module's own parameters and buffers to `device`."""
    module._apply(lambda tensor: tensor.to(device), recurse=False)


def device_of_module(name: str, where: Mapping[str, torch.device]) -> torch.device:
    """Return the device that :func:`balanced` chose for a module or for the nearest module that contains it."""
    while name:
        if name in where:
            return where[name]
        name = name.rpartition(".")[0]
    return next(iter(where.values()))


def pretrained_spread(name: str, devices: Sequence[torch.device], **arguments: Any) -> Any:
    """Load a pretrained causal LM, with its layers spread over one or more devices.

    `name` and `arguments` are those of ``AutoModelForCausalLM.from_pretrained``. With ``output_loading_info=True``, the
    result is the model and transformers' loading report.

    Raises:
        OSError, ValueError, KeyError, ImportError: transformers cannot load the model.
        ModelError: the model has no list of decoder layers.
    """
    from accelerate.hooks import remove_hook_from_submodules
    from transformers import AutoConfig, AutoModelForCausalLM

    about_weights = ("config", "dtype", "output_loading_info", "ignore_mismatched_sizes", "quantization_config")
    common = {key: value for key, value in arguments.items() if key not in about_weights}
    config = arguments.get("config") or AutoConfig.from_pretrained(name, **common)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, trust_remote_code=bool(common.get("trust_remote_code")))
    where = balanced(outline, devices)
    named = {part: device.index if device.type == "cuda" else str(device) for part, device in where.items()}
    loaded = AutoModelForCausalLM.from_pretrained(name, device_map=named, **arguments)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    remove_hook_from_submodules(model)
    connect(model, where)
    return (model.eval(), loaded[1]) if isinstance(loaded, tuple) else model.eval()


def connect(model: Any, where: Mapping[str, torch.device]) -> None:
    """Install hooks that let a model run although its modules are on the several devices of `where` (:func:`balanced`).

    The hooks copy the inputs of each module to its device, and the logits to the first device.
    """
    first = next(iter(where.values()))
    model.hf_device_map = {name: str(device) for name, device in where.items()}
    devices = tuple(dict.fromkeys(where.values()))
    record_placement(model, Placement(devices=devices))
    if len(devices) == 1:
        return
    carrier = Carrier()
    model.register_forward_pre_hook(carrier.begin, prepend=True)
    for name, device in where.items():
        model.get_submodule(name).register_forward_pre_hook(carrier.to(device), with_kwargs=True, prepend=True)
    model.register_forward_hook(lambda module, inputs, output: carrier.back(output, first))


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to `device` without waiting for it, and return the copies."""
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


#: function that copies tensors between devices in forward passes of this context
_mover: ContextVar[Mover] = ContextVar("kvbench_mover", default=moved)


@contextmanager
def moving(by: Mover) -> Iterator[None]:
    """Copy tensors between devices by the function `by`, in place of :func:`moved`, inside a ``with`` block.

    It is called once whenever a forward pass goes on to another device, with all tensors that are needed there.
    """
    token = _mover.set(by)
    try:
        yield
    finally:
        _mover.reset(token)


class Carrier:
    """Forward hooks of a model on several devices, which copy tensors to the device that needs them next.

    Positional arguments (hidden states) are copied every time. Keyword arguments (mask, rotary angles), which all
    layers share, are copied once per forward pass and device; the copies are kept for the other layers on that device.
    """

    def __init__(self) -> None:
        # originals are kept with their copies, so that their ids, which are keys, are not reused
        self._copies: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """Discard tensors cached by an earlier forward pass that failed (forward pre-hook of the model).

        They are copies of keyword arguments, such as the attention mask and the rotary angles, on other devices.
        """
        self._copies.clear()

    def to(self, device: torch.device) -> Any:
        """Return a forward pre-hook that copies the arguments of a module to `device` before the module runs."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            hidden = {id(x): x for x in elsewhere(args, device)}
            shared = {id(x): x for x in elsewhere(tuple(kwargs.values()), device)}
            fresh = {key: x for key, x in shared.items() if (key, device) not in self._copies}
            wanted = {**fresh, **hidden}
            copies = dict(zip(wanted, _mover.get()(list(wanted.values()), device), strict=True)) if wanted else {}
            self._copies.update({(key, device): (x, copies[key]) for key, x in fresh.items()})
            shared_copies = {key: self._copies[key, device][1] for key in shared}
            return replaced(args, copies), {key: replaced(value, shared_copies) for key, value in kwargs.items()}

        return hook

    def back(self, output: Any, device: torch.device) -> Any:
        """Move the logits in `output`, in place, to the device of the input tokens, and return `output`.

        The tensors cached during this forward pass are discarded.
        """
        self._copies.clear()
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.device != device:
            [output.logits] = _mover.get()([logits], device)
        return output


def elsewhere(value: Any, device: torch.device) -> list[Tensor]:
    """Return the tensors in a value, or in tuples and lists of values, that are not on `device`."""
    if isinstance(value, Tensor):
        return [value] if value.device != device else []
    return [x for item in value for x in elsewhere(item, device)] if type(value) in (tuple, list) else []


def replaced(value: Any, copies: Mapping[int, Tensor]) -> Any:
    """Return a value, or tuples and lists of values, with tensors replaced by their copies.

    `copies` has them by the ``id`` of the tensors that they replace. Anything that is neither a tensor nor a tuple or
    list is returned as it is.
    """
    if isinstance(value, Tensor):
        return copies.get(id(value), value)
    return type(value)(replaced(item, copies) for item in value) if type(value) in (tuple, list) else value
