"""The models of the zoo: family, rough size, and which settings they stand. Pure data, and how it scales.

`each_mib` is what one sample (or one token) roughly adds in fp32 at the reference length. It was guessed, not
measured: it spreads the batch sizes and serves no other end.
"""

from __future__ import annotations

from typing import Literal

import msgspec

IMAGES = (160, 192, 224, 224, 224, 256, 288)
WINDOWS = (192, 224, 224, 256)
SMALL = (32, 64, 128, 224)
TEXT = (64, 128, 256, 512)
LONG = (128, 256, 512, 1024)
PURE = ("bf16",)


class Entry(msgspec.Struct, frozen=True):
    model: str
    family: str
    each_mib: float
    weights_m: float
    lengths: tuple[int, ...] = ()
    reference: int = 224
    per: Literal["image", "volume", "signal", "token", "row"] = "image"
    cases: int = 5
    checkpoint: bool = False
    channels_last: bool = True
    padding: bool = False
    evaluate: bool = True
    without: tuple[str, ...] = ()
    most: int = 512
    least: int = 2

    def scaled_mib(self, length: int) -> float:
        """What one sample adds at this length: images by area, volumes by content, signals and tokens in line."""
        power = {"image": 2, "volume": 3, "signal": 1, "token": 1, "row": 0}[self.per]
        if not length:
            return self.each_mib
        return self.each_mib * (length / self.reference) ** power


def _images(family: str, models: str, lengths: tuple[int, ...] = IMAGES, checkpoint: bool = False) -> list[Entry]:
    """From `name each_mib weights_m` triples."""
    words = models.split()
    return [
        Entry(words[i], family, float(words[i + 1]), float(words[i + 2]), lengths, checkpoint=checkpoint)
        for i in range(0, len(words), 3)
    ]


def _texts(family: str, models: str, lengths: tuple[int, ...] = TEXT, checkpoint: bool = True) -> list[Entry]:
    """From `name each_mib weights_m` triples; a sample's share is for one token."""
    words = models.split()
    return [
        Entry(
            f"hf-{words[i]}", family, float(words[i + 1]), float(words[i + 2]), lengths, reference=1, per="token",
            checkpoint=checkpoint, padding=True, most=256,
        )
        for i in range(0, len(words), 3)
    ]  # fmt: skip


TORCHVISION = [
    *_images("alexnet", "alexnet 5 61", (128, 224, 256)),
    *_images("vgg", "vgg11 60 133 vgg16 115 138 vgg19_bn 210 144", (64, 128, 192, 224)),
    *_images("resnet", "resnet18 24 12", (32, 64, 128, 224, 256), True),
    *_images("resnet", "resnet34 36 22 resnet50 88 26 resnet101 130 45 resnet152 180 60", IMAGES, True),
    *_images("resnext", "resnext50_32x4d 115 25 resnext101_32x8d 260 89", IMAGES, True),
    *_images("wide-resnet", "wide_resnet50_2 120 69 wide_resnet101_2 190 127"),
    *_images("densenet", "densenet121 130 8 densenet161 240 29 densenet169 155 14 densenet201 200 20"),
    *_images("mobilenet", "mobilenet_v2 78 4 mobilenet_v3_small 18 3 mobilenet_v3_large 58 6", (96, *IMAGES)),
    *_images("efficientnet", "efficientnet_b0 88 5 efficientnet_b1 125 8 efficientnet_b2 135 9"),
    *_images("efficientnet", "efficientnet_b3 190 12 efficientnet_b4 270 19", (224, 260, 300)),
    *_images("efficientnet-v2", "efficientnet_v2_s 155 22 efficientnet_v2_m 270 54"),
    *_images("mnasnet", "mnasnet0_5 35 2 mnasnet1_0 68 4"),
    *_images("shufflenet", "shufflenet_v2_x1_0 26 2 shufflenet_v2_x2_0 60 7"),
    *_images("squeezenet", "squeezenet1_0 48 1 squeezenet1_1 30 1"),
    *_images("inception", "googlenet 55 13", (192, 224, 256)),
    *_images("inception", "inception_v3 66 27", (299,)),
    *_images("regnet", "regnet_y_400mf 32 4 regnet_y_1_6gf 85 11 regnet_x_800mf 45 7 regnet_x_3_2gf 95 15"),
    *_images("regnet", "regnet_y_8gf 150 39"),
    *_images("convnext", "convnext_tiny 135 29 convnext_small 225 50 convnext_base 300 89", IMAGES, True),
    *_images("vit", "vit_b_16 155 86 vit_b_32 42 88 vit_l_16 410 304", WINDOWS, True),
    *_images("swin", "swin_t 165 28 swin_s 270 50 swin_b 360 88 swin_v2_t 220 28", WINDOWS),
    *_images("maxvit", "maxvit_t 340 31", (224,)),
    *_images("segmentation", "fcn_resnet50 210 35 deeplabv3_resnet50 240 42", (224, 320, 480, 520)),
    *_images("segmentation", "deeplabv3_mobilenet_v3_large 75 11 lraspp_mobilenet_v3_large 65 3", (224, 320, 480)),
]
# Detection pads and resizes its images itself; in half precision alone its anchors do not match. In evaluation it
# answers with boxes, not with a loss.
DETECTION = [
    Entry("fasterrcnn_mobilenet_v3_large_320_fpn", "detection", 60, 19, (320, 480), channels_last=False,
          evaluate=False, without=PURE, most=64, cases=4),
    Entry("retinanet_resnet50_fpn", "detection", 60, 34, (320, 480), channels_last=False,
          evaluate=False, without=PURE, most=16, cases=4),
]  # fmt: skip
VIDEO = [
    Entry("r3d_18", "video", 170, 33, (96, 112, 128), 112, most=96, channels_last=False),
    Entry("mc3_18", "video", 160, 12, (96, 112, 128), 112, most=96, channels_last=False),
]
TRANSFORMERS = [
    *_texts("bert", "bert-mlm 1.0 110 bert-cls 0.65 110 bert-large-mlm 2.1 335"),
    *_texts("roberta", "roberta-mlm 1.2 125 roberta-cls 0.65 125"),
    *_texts("distilbert", "distilbert-mlm 0.7 66 distilbert-cls 0.36 66"),
    *_texts("albert", "albert-mlm 1.0 12", checkpoint=False),
    *_texts("electra", "electra-cls 0.65 110 electra-token 0.25 14"),
    *_texts("deberta", "deberta-cls 2.4 184 deberta-token 1.2 70", (64, 128, 256)),
    *_texts("gpt2", "gpt2 1.5 124 gpt2-medium 2.9 355 gpt2-large 4.8 774", LONG),
    *_texts("gpt-neo", "gpt-neo 1.8 125 gpt-neox 1.6 162", LONG),
    *_texts("opt", "opt 1.5 125 opt-350m 2.8 331", LONG),
    *_texts("llama", "llama-110m 1.2 134 llama-350m 2.5 360 llama-700m 3.2 720", LONG),
    *_texts("mistral", "mistral 1.7 210", LONG),
    *_texts("qwen2", "qwen2 4.0 494", LONG),
    *_texts("gemma", "gemma 2.8 210", LONG),
    *_texts("phi", "phi 2.0 270", LONG),
    *_texts("t5", "t5-small 1.0 60 t5-base 3.0 223"),
    *_texts("bart", "bart-base 1.6 139 marian 1.6 74"),
    *_texts("xlnet", "xlnet 2.4 117", (64, 128, 256), checkpoint=False),
    *_images("hf-vit", "hf-vit 155 86 hf-deit 80 22 hf-dinov2 115 22", (224,), True),
    *_images("hf-beit", "hf-beit 210 86", (224,), True),
    *_images("hf-swin", "hf-swin 175 28", (224,), True),
    *_images("hf-convnet", "hf-convnextv2 200 29 hf-resnet 90 26"),
    *_images("segformer", "hf-segformer-b0 55 4 hf-segformer-b2 160 27", (224, 320, 512)),
    Entry("hf-whisper-tiny", "whisper", 220, 38, (64, 128, 256), 128, "token", checkpoint=True, most=64),
    Entry("hf-whisper-base", "whisper", 480, 73, (64, 128, 256), 128, "token", checkpoint=True, most=48),
    Entry("hf-wav2vec2", "wav2vec2", 75, 95, (16000, 48000, 80000), 16000, "signal", most=96),
    Entry("hf-hubert", "wav2vec2", 75, 95, (16000, 48000, 80000), 16000, "signal", most=96),
    Entry("hf-clip", "clip", 70, 151, (), channels_last=False, checkpoint=True, most=256),
]


def _own(model: str, family: str, each_mib: float, weights_m: float, **settings: object) -> Entry:
    return msgspec.convert(
        {"model": f"own-{model}", "family": f"own-{family}", "each_mib": each_mib, "weights_m": weights_m, "cases": 4}
        | settings,
        Entry,
    )


_TOKEN = {"reference": 1, "per": "token", "lengths": (64, 128, 256, 512)}
_ROW = {"per": "row", "most": 65536, "channels_last": False}
OWN = [
    _own("unet2d", "unet", 420, 31, lengths=(128, 256, 384), reference=256, checkpoint=True),
    _own("unet2d-small", "unet", 120, 2, lengths=(128, 256, 512), reference=256, checkpoint=True),
    _own("unet3d", "unet", 260, 3, lengths=(32, 64, 96), reference=64, per="volume", least=1),
    _own("cifar-resnet", "cifar", 5, 1, lengths=(32, 64), reference=32, checkpoint=True, most=4096),
    _own("cifar-resnet-wide", "cifar", 26, 17, lengths=(32, 64), reference=32, checkpoint=True, most=2048),
    _own("se-net", "se", 85, 4, lengths=IMAGES, checkpoint=True),
    _own("se-net-wide", "se", 250, 20, lengths=IMAGES, checkpoint=True),
    _own("wavenet", "audio", 650, 1, lengths=(4000, 8000, 16000), reference=8000, per="signal", most=128),
    _own("ctc", "audio", 35, 10, lengths=(400, 800, 1600), reference=800, per="signal", without=PURE),
    _own("dcgan", "gan", 9, 6, lengths=(64, 128), reference=64, evaluate=False, most=1024, cases=6),
    _own("vae", "autoencoder", 3, 5, lengths=(64, 128, 256), reference=64, most=1024),
    _own("autoencoder", "autoencoder", 9, 3, lengths=(128, 256), reference=128, most=1024),
    _own("pixelcnn", "pixelcnn", 16, 1, lengths=(32, 64), reference=32, most=1024),
    _own("triplet", "triplet", 22, 1, lengths=(64, 96, 128), reference=64, most=1024),
    _own("convnext", "convnext", 85, 8, lengths=IMAGES, checkpoint=True),
    _own("diffusion", "diffusion", 90, 20, lengths=(32, 64, 96), reference=64, cases=6),
    _own("lstm-1", "rnn", 0.28, 50, **_TOKEN),
    _own("lstm-2", "rnn", 0.32, 58, **_TOKEN),
    _own("lstm-4", "rnn", 0.4, 75, **_TOKEN),
    _own("gru-1", "rnn", 0.28, 20, **_TOKEN),
    _own("gru-3", "rnn", 0.32, 28, **_TOKEN),
    _own("bilstm", "rnn", 0.08, 16, most=1024, **_TOKEN),
    _own("series", "rnn", 0.04, 3, most=4096, **_TOKEN),
    _own("translator", "rnn", 0.35, 40, **_TOKEN),
    _own("nanogpt", "nanogpt", 1.05, 110, checkpoint=True, **_TOKEN),
    _own("nanogpt-medium", "nanogpt", 2.2, 335, checkpoint=True, **_TOKEN),
    _own("encoder", "transformer", 0.55, 83, padding=True, **_TOKEN),
    _own("pair", "transformer", 1.2, 77, **_TOKEN),
    _own("mixer", "mixer", 105, 60, lengths=(192, 224, 256), checkpoint=True),
    _own("mlp-3x1024", "mlp", 0.03, 3, cases=3, **_ROW),
    _own("mlp-4x4096", "mlp", 0.13, 54, cases=3, **_ROW),
    _own("mlp-8x8192", "mlp", 0.5, 480, cases=3, **_ROW),
    _own("mlp-16x2048", "mlp", 0.25, 65, cases=3, **_ROW),
    _own("mlp-norm-6x4096", "mlp", 0.4, 87, cases=3, **_ROW),
    _own("dlrm", "recommender", 0.09, 167, cases=4, **_ROW),
    _own("dlrm-large", "recommender", 0.15, 666, cases=3, **_ROW),
    _own("ncf", "recommender", 0.03, 155, cases=4, **_ROW),
    _own("graph", "graph", 210, 2, per="row", most=96, channels_last=False, cases=6),
]
LINEUP: tuple[Entry, ...] = (*TORCHVISION, *DETECTION, *VIDEO, *TRANSFORMERS, *OWN)
