"""The networks of models.py and the modes in which they run, with random weights; nothing is downloaded.

network.py      what the benchmark knows of a network
modes.py        eager torch, torch.compile, Liger, fastlayers
language.py     decoders, encoders, encoders with a decoder
vision.py       classifiers of three libraries, segmentation of volumes
multimodal.py   speech, images with texts
diffusion.py    U-Net, autoencoder, transformer
"""

from benchmarks.networks.diffusion import DIFFUSION
from benchmarks.networks.language import BERT, GPT2, LANGUAGE, LLAMA
from benchmarks.networks.modes import MODES
from benchmarks.networks.multimodal import MULTIMODAL
from benchmarks.networks.network import Network
from benchmarks.networks.vision import CONVNEXT, EFFICIENTNET, RESNET, VISION, VIT

#: Those of the README.
MAIN: tuple[Network, ...] = (LLAMA, GPT2, BERT, RESNET, VIT, CONVNEXT, EFFICIENTNET)
NETWORKS: tuple[Network, ...] = (*MAIN, *LANGUAGE, *VISION, *MULTIMODAL, *DIFFUSION)

__all__ = ["MAIN", "MODES", "NETWORKS", "Network"]
