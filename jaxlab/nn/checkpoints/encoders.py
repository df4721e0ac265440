"""Families of encoders: BERT, DistilBERT, ViT, the image side of CLIP, and DINOv2 with or without registers.

Files carry the network's prefix (``bert.encoder.…``) when it was saved with a head, and often lack it otherwise. Our
paths never have it, so that an encoder's parameters are the same tree with or without a head; what is written always
has it, which ``transformers`` reads into either. A head is read where ``"architectures"`` names a network for
classification (or CLIP's projection). Heads for pre-training are left out. That a network for neither has no pooler is
not said by any setting of ``transformers``; ours is ``"add_pooling_layer": false``, after the argument of its classes.

A setting that changes the network and that ours lacks is an error.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from jaxlab.nn import bert, clip_vision, dinov2, distilbert, vit
from jaxlab.nn.bert import BertConfig
from jaxlab.nn.checkpoints.family import Family
from jaxlab.nn.clip_vision import CLIPVisionConfig
from jaxlab.nn.dinov2 import Dinov2Config
from jaxlab.nn.distilbert import DistilBertConfig
from jaxlab.nn.encoder import EncoderConfig
from jaxlab.nn.patches import VisionConfig
from jaxlab.nn.vit import ViTConfig

__all__ = ["FAMILIES"]


def _read_bert(settings: Mapping[str, Any]) -> BertConfig:
    _refuse(settings, {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False})
    return BertConfig(
        **_sizes(settings),
        **_read_shared(settings, ("BertForSequenceClassification",)),
        vocab_size=_required(settings, "vocab_size"),
        max_position_embeddings=settings.get("max_position_embeddings", 512),
        type_vocab_size=settings.get("type_vocab_size", 2),
        norm_eps=settings.get("layer_norm_eps", 1e-12),
        pooler=settings.get("add_pooling_layer", not _names(settings, ("BertForMaskedLM",))),
    )


def _write_bert(config: BertConfig) -> dict[str, Any]:
    written = {
        **_write_shared(config, base="BertModel", head="SequenceClassification"),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "position_embedding_type": "absolute",
    }
    return written if config.pooler else {**written, "add_pooling_layer": False}


def _read_distilbert(settings: Mapping[str, Any]) -> DistilBertConfig:
    renamed = {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
    }
    return DistilBertConfig(
        **{ours: _required(settings, theirs) for ours, theirs in renamed.items()},
        **_read_shared(settings, ("DistilBertForSequenceClassification",), activation="activation"),
        vocab_size=_required(settings, "vocab_size"),
        max_position_embeddings=settings.get("max_position_embeddings", 512),
    )


def _write_distilbert(config: DistilBertConfig) -> dict[str, Any]:
    if config.norm_eps != 1e-12:
        raise ValueError(f"model_type 'distilbert' has norm_eps 1e-12, always; got {config.norm_eps}")
    return {
        "architectures": [_architecture(config, "DistilBertModel", "SequenceClassification")],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "activation": config.hidden_act,
        "initializer_range": config.initializer_range,
        **_write_labels(config),
    }


def _read_vit(settings: Mapping[str, Any]) -> ViTConfig:
    labelled = ("ViTForImageClassification",)
    return ViTConfig(
        **_sizes(settings),
        **_read_shared(settings, labelled),
        **_read_images(settings, patch_size=16),
        norm_eps=settings.get("layer_norm_eps", 1e-12),
        qkv_bias=settings.get("qkv_bias", True),
        pooler=settings.get("add_pooling_layer", not _names(settings, labelled)),
        pooler_output_size=settings.get("pooler_output_size"),
        pooler_act=settings.get("pooler_act", "tanh"),
    )


def _write_vit(config: ViTConfig) -> dict[str, Any]:
    if config.pooler and config.num_labels is not None:
        raise ValueError(f"model_type 'vit' has no pooler beside classes; got num_labels={config.num_labels}")
    written = {
        **_write_shared(config, base="ViTModel", head="ImageClassification"),
        **_write_images(config),
        "qkv_bias": config.qkv_bias,
        "pooler_output_size": config.pooler_output_size,
        "pooler_act": config.pooler_act,
    }
    return written if config.pooler or config.num_labels else {**written, "add_pooling_layer": False}


def _read_clip_vision(settings: Mapping[str, Any]) -> CLIPVisionConfig:
    projected = _names(settings, ("CLIPVisionModelWithProjection", "CLIPModel"))
    return CLIPVisionConfig(
        **_sizes(settings),
        **_read_shared(settings, (), activation_default="quick_gelu"),
        **_read_images(settings, patch_size=32),
        norm_eps=settings.get("layer_norm_eps", 1e-5),
        projection_dim=settings.get("projection_dim", 512) if projected else None,
    )


def _write_clip_vision(config: CLIPVisionConfig) -> dict[str, Any]:
    written = {**_write_shared(config, base="CLIPVisionModel", head=""), **_write_images(config)}
    if config.projection_dim is not None:
        written |= {"architectures": ["CLIPVisionModelWithProjection"], "projection_dim": config.projection_dim}
    return written


def _read_clip(settings: Mapping[str, Any]) -> CLIPVisionConfig:
    whole = {name: settings[name] for name in ("architectures", "projection_dim", *_DTYPE) if name in settings}
    # What the file of both sides says of the whole is meant, whatever its part for images repeats.
    return _read_clip_vision({**_required(settings, "vision_config"), "architectures": ["CLIPModel"], **whole})


def _write_clip(config: CLIPVisionConfig) -> NoReturn:
    raise ValueError(
        "model_type 'clip' has a side for texts too: save the image side as model_type 'clip_vision_model'"
    )


def _read_dinov2(settings: Mapping[str, Any]) -> Dinov2Config:
    registers = settings["model_type"] == "dinov2_with_registers"
    sizes = _sizes({**settings, "intermediate_size": None})
    sizes["intermediate_size"] = int(sizes["hidden_size"] * settings.get("mlp_ratio", 4))
    return Dinov2Config(
        **sizes,
        **_read_shared(settings, ("Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification")),
        **_read_images(settings, patch_size=16 if registers else 14),
        norm_eps=settings.get("layer_norm_eps", 1e-6),
        num_register_tokens=settings.get("num_register_tokens", 4) if registers else None,
        qkv_bias=settings.get("qkv_bias", True),
        layer_scale=settings.get("layerscale_value", 1.0),
        mask_token=registers or settings.get("use_mask_token", True),
        swiglu=settings.get("use_swiglu_ffn", False),
    )


def _write_dinov2(config: Dinov2Config) -> dict[str, Any]:
    if config.num_register_tokens is not None:
        raise ValueError("model_type 'dinov2' has no register tokens: save it as model_type 'dinov2_with_registers'")
    return {**_write_dinov2_settings(config, "Dinov2Model"), "use_mask_token": config.mask_token}


def _write_dinov2_with_registers(config: Dinov2Config) -> dict[str, Any]:
    if config.num_register_tokens is None:
        raise ValueError("model_type 'dinov2_with_registers' needs register tokens: save it as model_type 'dinov2'")
    if not config.mask_token:
        raise ValueError("model_type 'dinov2_with_registers' has a mask token, always; got mask_token=False")
    written = _write_dinov2_settings(config, "Dinov2WithRegistersModel")
    return {**written, "num_register_tokens": config.num_register_tokens}


def _write_dinov2_settings(config: Dinov2Config, base: str) -> dict[str, Any]:
    ratio, rest = divmod(config.intermediate_size, config.hidden_size)
    if rest:
        raise ValueError(
            "model_type 'dinov2' has an intermediate_size that is a multiple of hidden_size; "
            f"got {config.intermediate_size} and {config.hidden_size}"
        )
    written = {**_write_shared(config, base=base, head="ImageClassification"), **_write_images(config)}
    del written["intermediate_size"]
    return written | {
        "mlp_ratio": ratio,
        "qkv_bias": config.qkv_bias,
        "layerscale_value": config.layer_scale,
        "use_swiglu_ffn": config.swiglu,
    }


def _sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
    }
    return {ours: _required(settings, theirs) for ours, theirs in names.items()}


def _required(settings: Mapping[str, Any], name: str) -> Any:
    if name not in settings:
        raise ValueError(f"config.json lacks {name!r}")
    return settings[name]


def _refuse(settings: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    for name, value in supported.items():
        if settings.get(name, value) != value:
            raise ValueError(f"config.json: {name}={settings[name]!r} is not supported, only {value!r}")


def _names(settings: Mapping[str, Any], architectures: tuple[str, ...]) -> bool:
    return bool(set(architectures) & set(settings.get("architectures") or ()))


def _read_shared(
    settings: Mapping[str, Any],
    labelled: tuple[str, ...],
    *,
    activation: str = "hidden_act",
    activation_default: str = "gelu",
) -> dict[str, Any]:
    dtype = next((str(settings[name]) for name in _DTYPE if settings.get(name)), "float32")
    labels = settings.get("id2label")
    count = settings.get("num_labels", 2) if labels is None else len(labels)
    return {
        "hidden_act": settings.get(activation, activation_default),
        "num_labels": count if _names(settings, labelled) else None,
        "initializer_range": settings.get("initializer_range", 0.02),
        "dtype": dtype,
        "param_dtype": dtype,
    }


def _architecture(config: EncoderConfig, base: str, head: str) -> str:
    return base if config.num_labels is None else base.removesuffix("Model") + "For" + head


def _write_labels(config: EncoderConfig) -> dict[str, Any]:
    if config.num_labels is None:
        return {}
    names = [f"LABEL_{index}" for index in range(config.num_labels)]
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def _write_shared(config: EncoderConfig, *, base: str, head: str) -> dict[str, Any]:
    return {
        "architectures": [_architecture(config, base, head)],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": config.hidden_act,
        "layer_norm_eps": config.norm_eps,
        "initializer_range": config.initializer_range,
        **_write_labels(config),
    }


def _read_images(settings: Mapping[str, Any], *, patch_size: int) -> dict[str, Any]:
    image, patch = settings.get("image_size", 224), settings.get("patch_size", patch_size)
    if not isinstance(patch, int):
        if len(set(patch)) != 1:
            raise ValueError(f"config.json: patch_size={patch!r} is not supported, only squares")
        patch = patch[0]
    image = image if isinstance(image, int) else tuple(image)
    return {"image_size": image, "patch_size": patch, "num_channels": settings.get("num_channels", 3)}


def _write_images(config: VisionConfig) -> dict[str, Any]:
    size = config.image_size if isinstance(config.image_size, int) else list(config.image_size)
    return {"image_size": size, "patch_size": config.patch_size, "num_channels": config.num_channels}


def _family(prefix: str, parts: tuple[str, ...], **options: Any) -> Family:
    """A family whose files put a prefix before the names that start with one of ``parts``, or do not."""
    return Family(
        renames=(
            (rf"^{prefix}\.", ""),
            (r"LayerNorm\.gamma$", "LayerNorm.weight"),
            (r"LayerNorm\.beta$", "LayerNorm.bias"),
        ),
        write_renames=((rf"^({'|'.join(parts)})\.", rf"{prefix}.\1."),),
        **options,
    )


_DTYPE = ("dtype", "torch_dtype")
_CLIP_PARTS = ("embeddings", "pre_layrnorm", "encoder", "post_layernorm")

FAMILIES: tuple[Family, ...] = (
    _family(
        "bert",
        ("embeddings", "encoder", "pooler"),
        model_type="bert",
        architectures=("BertModel", "BertForSequenceClassification", "BertForMaskedLM", "BertForPreTraining"),
        read_config=_read_bert,
        write_config=_write_bert,
        init=bert.init,
        make_apply=bert.make_apply,
        blocks=("encoder/layer",),
        ignored=(r"^embeddings\.position_ids$", r"^cls\.", r"^pooler\."),
    ),
    _family(
        "distilbert",
        ("embeddings", "transformer"),
        model_type="distilbert",
        architectures=("DistilBertModel", "DistilBertForSequenceClassification", "DistilBertForMaskedLM"),
        read_config=_read_distilbert,
        write_config=_write_distilbert,
        init=distilbert.init,
        make_apply=distilbert.make_apply,
        blocks=("transformer/layer",),
        ignored=(r"^vocab_(transform|layer_norm|projector)\.",),
    ),
    _family(
        "vit",
        ("embeddings", "encoder", "layernorm", "pooler"),
        model_type="vit",
        architectures=("ViTModel", "ViTForImageClassification"),
        read_config=_read_vit,
        write_config=_write_vit,
        init=vit.init,
        make_apply=vit.make_apply,
        blocks=("encoder/layer",),
        ignored=(r"^embeddings\.mask_token$",),
    ),
    _family(
        "vision_model",
        _CLIP_PARTS,
        model_type="clip_vision_model",
        architectures=("CLIPVisionModel", "CLIPVisionModelWithProjection"),
        read_config=_read_clip_vision,
        write_config=_write_clip_vision,
        init=clip_vision.init,
        make_apply=clip_vision.make_apply,
        blocks=("encoder/layers",),
        ignored=(r"^embeddings\.position_ids$",),
    ),
    _family(
        "vision_model",
        _CLIP_PARTS,
        model_type="clip",
        architectures=("CLIPModel",),
        read_config=_read_clip,
        write_config=_write_clip,
        init=clip_vision.init,
        make_apply=clip_vision.make_apply,
        blocks=("encoder/layers",),
        ignored=(r"^embeddings\.position_ids$", r"^text_model\.", r"^text_projection\.", r"^logit_scale$"),
    ),
    _family(
        "dinov2",
        ("embeddings", "encoder", "layernorm"),
        model_type="dinov2",
        architectures=("Dinov2Model", "Dinov2ForImageClassification"),
        read_config=_read_dinov2,
        write_config=_write_dinov2,
        init=dinov2.init,
        make_apply=dinov2.make_apply,
        blocks=("encoder/layer",),
    ),
    _family(
        "dinov2_with_registers",
        ("embeddings", "encoder", "layernorm"),
        model_type="dinov2_with_registers",
        architectures=("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
        read_config=_read_dinov2,
        write_config=_write_dinov2_with_registers,
        init=dinov2.init,
        make_apply=dinov2.make_apply,
        blocks=("encoder/layer",),
    ),
)
