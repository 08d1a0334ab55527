"""All that knows a model library. The engine asks adapters; :mod:`fastlayers.patching.libraries.adapters` says what."""

from fastlayers.patching.libraries.adapters import Adapter, register_adapter


def _transformers() -> Adapter:
    from fastlayers.patching.libraries.transformers.adapter import TransformersAdapter

    return TransformersAdapter()


register_adapter("transformers", _transformers)


def _peft() -> Adapter:
    from fastlayers.patching.libraries.peft import PeftAdapter

    return PeftAdapter()


register_adapter("peft", _peft)
