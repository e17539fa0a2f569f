"""LoRA adapters in the PEFT directory layout. Knows adapter_config.json and its tensors; knows no forward pass.

An adapter is known by the content of its files, never by its name or path. What PEFT can do beyond plain LoRA is
refused by name. Layout: https://huggingface.co/docs/peft (checkpoint format).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvouch.artefact.files import ArtefactFiles
from kvouch.artefact.manifest import Manifest
from kvouch.errors import AdapterError
from kvouch.loader.safetensors import read_safetensors
from kvouch.models.linear import Linear
from kvouch.models.lora import LoraPart, Parts
from kvouch.models.step import ModelWeights, Target

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

INERT = frozenset(
    """
    peft_type task_type base_model_name_or_path revision inference_mode lora_dropout auto_mapping
    megatron_core peft_version fan_in_fan_out loftq_config eva_config corda_config ensure_weight_tying
    r lora_alpha use_rslora target_modules rank_pattern alpha_pattern exclude_modules
    """.split()
)
"""Fields that are read below, or that compute nothing once an adapter is trained; init_lora_weights is not one."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "bias": ("none",),
        "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base
        "use_dora": (False, None),
        "modules_to_save": (None, []),
        "layers_to_transform": (None,),
        "layers_pattern": (None,),
        "layer_replication": (None,),
        "megatron_config": (None,),
        "trainable_token_indices": (None,),
        "target_parameters": (None, []),
        "lora_bias": (False, None),
        "use_qalora": (False, None),
        "qalora_group_size": (None, 16),
        "use_bdlora": (False, None),
        "alora_invocation_tokens": (None,),
        "arrow_config": (None,),
        "runtime_config": (None, {"ephemeral_gpu_offload": False}),
    }
)
"""Fields that would change the computation, with the values under which they do not."""


AT_END = r"(.*\.)?({})$"
"""How PEFT takes a pattern of ranks or alphas: for the end of a module's name."""


@dataclass(frozen=True, kw_only=True)
class LoraTensors:
    """One correction as it was trained: A [r, K], B [n, r], and alpha / r (or alpha / sqrt(r))."""

    layer: int
    target: Target
    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What an adapter's directory holds."""

    name: str  # of its directory
    digest: str
    tensors: tuple[LoraTensors, ...]

    def parts(self, pack: Callable[[Tensor], Linear], device: torch.device) -> Parts:
        """Its corrections, packed, at scale 1."""
        found: dict[tuple[int, str], list[LoraPart]] = {}
        for one in self.tensors:
            part = LoraPart(
                down=pack(one.a.to(device, torch.float32)),
                up=pack(one.b.to(device, torch.float32)),
                start=one.target.start,
                stop=one.target.start + one.target.outputs,
                scale=one.scaling,
            )
            found.setdefault((one.layer, one.target.linear), []).append(part)
        return found


def read_adapter(directory: Path, weights: ModelWeights) -> Adapter:
    """An adapter for these weights. Raises FileError, and AdapterError that names the field or tensor that is wrong."""
    files = ArtefactFiles(directory)
    config = _Config(files.json(CONFIG), f"{files.directory / CONFIG}")
    with files.open(TENSORS) as file:
        tensors = dict(read_safetensors(file))
    where = f"{files.directory / TENSORS}"
    found = [_pair(*meant, tensors, config, where) for meant in _modules(tensors, config, weights, where)]
    return Adapter(
        name=files.directory.name, digest=Manifest.of_files(files, ["adapter"]).part("adapter"), tensors=tuple(found)
    )


class _Config:
    """The fields of an adapter_config.json."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where = fields, where
        if fields.get("peft_type") != "LORA":
            raise self.error("peft_type", f"is {fields.get('peft_type')!r}; only LORA is supported")
        for name, value in fields.items():
            if name in INERT:
                continue
            if name not in NEUTRAL:
                raise self.error(name, f"is {value!r}: unknown, so it may change the computation")
            if value not in NEUTRAL[name]:
                raise self.error(name, f"is {value!r}: not supported, only {NEUTRAL[name][0]!r}")
        self._rank = self._number("r", fields.get("r"), whole=True)
        self._alpha = self._number("lora_alpha", fields.get("lora_alpha"))
        self._ranks, self._alphas = self._pattern("rank_pattern"), self._pattern("alpha_pattern")
        self._rslora = fields.get("use_rslora", False)
        if type(self._rslora) is not bool:
            raise self.error("use_rslora", f"is {self._rslora!r}; true or false is needed")
        self._targets = fields.get("target_modules")

    def error(self, field: str, problem: str) -> AdapterError:
        return AdapterError(f"{self._where}: {field} {problem}")

    def targets(self, module: str) -> bool:
        """Whether `target_modules` (names, or one regular expression) means a module; excluded ones are not meant."""
        return self._means("target_modules", self._targets, module) and not self._means(
            "exclude_modules", self._fields.get("exclude_modules") or [], module
        )

    def rank(self, module: str) -> int:
        return int(_first_match(self._ranks, module, self._rank))

    def scaling(self, module: str) -> float:
        rank = self.rank(module)
        return _first_match(self._alphas, module, self._alpha) / (math.sqrt(rank) if self._rslora else rank)

    def _means(self, field: str, value: Any, module: str) -> bool:
        if value == "all-linear":
            return True
        if isinstance(value, str):
            return re.fullmatch(self._compiled(field, value), module) is not None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.error(field, f"is {value!r}; a list of names, or one regular expression, is needed")
        return any(module == name or module.endswith("." + name) for name in value)

    def _pattern(self, field: str) -> dict[str, float]:
        value = self._fields.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, f"is {value!r}; an object is needed")
        for name, number in value.items():
            self._compiled(field, name)
            self._number(f"{field}[{name!r}]", number, whole=field == "rank_pattern")
        return value

    def _compiled(self, field: str, text: str) -> str:
        try:
            re.compile(text)
            re.compile(AT_END.format(text))
        except (re.error, OverflowError, RecursionError) as error:
            raise self.error(field, f"has {text!r}, which is no regular expression ({error})") from error
        return text

    def _number(self, field: str, value: Any, *, whole: bool = False) -> float:
        kinds: tuple[type, ...] = (int,) if whole else (int, float)
        if type(value) not in kinds or not 0 < value < 2**31:
            raise self.error(field, f"is {value!r}; a positive {'whole ' if whole else ''}number is needed")
        return float(value)


def _first_match(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The first pattern that the module's name ends with, as PEFT takes it."""
    return next((value for key, value in patterns.items() if re.match(AT_END.format(key), module)), default)


def _modules(
    tensors: Mapping[str, Tensor], config: _Config, weights: ModelWeights, where: str
) -> list[tuple[str, int, Target]]:
    """Every product that the config means: name, layer, target. AdapterError where the tensors are not theirs."""
    known = [
        (f"{weights.module_prefix}{weights.layer_prefix}{layer}.{name}", layer, target)
        for layer in range(len(weights.blocks))
        for name, target in weights.targets().items()
    ]
    meant = [one for one in known if config.targets(one[0])]
    wanted = {f"{PREFIX}{module}.lora_{side}.weight" for module, *_ in meant for side in "AB"}
    odd, absent = sorted(tensors.keys() - wanted), sorted(wanted - tensors.keys())
    if odd:
        raise AdapterError(f"{where}: {_listed(odd)}: no product of this base that target_modules means")
    if absent or not meant:
        raise AdapterError(f"{where}: {_listed(absent) or 'every tensor'} missing; target_modules means them")
    return meant


def _pair(
    module: str, layer: int, target: Target, tensors: Mapping[str, Tensor], config: _Config, where: str
) -> LoraTensors:
    rank = config.rank(module)
    shapes = {"A": (rank, target.inputs), "B": (target.outputs, rank)}
    found = {}
    for side, shape in shapes.items():
        full = f"{PREFIX}{module}.lora_{side}.weight"
        tensor = tensors[full]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise AdapterError(
                f"{where}: {full} is {tensor.dtype} {list(tensor.shape)}; {list(shape)} by this base and its rank"
            )
        if not tensor.isfinite().all():
            raise AdapterError(f"{where}: {full} holds an infinity or a NaN")
        found[side] = tensor
    return LoraTensors(layer=layer, target=target, a=found["A"], b=found["B"], scaling=config.scaling(module))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
