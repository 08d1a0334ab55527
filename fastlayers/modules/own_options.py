"""Options that a fused layer has beside those of the torch layer that it subclasses."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import nn


class OwnOptions(nn.Module):
    """Mixin for a torch layer with more options: the annotated attributes of the class, with their defaults.

    They are keyword arguments of the constructor, and follow torch's fields in the repr where they differ from the
    default. A layer holds only those that differ, so that a torch layer becomes a fused one by its class alone.
    """

    own_options: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.own_options += tuple(inspect.get_annotations(cls))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in self.own_options if name in kwargs}
        super().__init__(*args, **kwargs)
        for name, value in own.items():
            if value != getattr(type(self), name):
                setattr(self, name, value)

    def extra_repr(self) -> str:
        fields = [super().extra_repr()]
        fields += [f"{name}={getattr(self, name)}" for name in self.own_options if name in self.__dict__]
        return ", ".join(filter(None, fields))
