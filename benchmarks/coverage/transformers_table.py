"""Which model classes of transformers are measured, what each is fed, and what its small config needs beyond sizes."""

from typing import Any

Row = tuple[str, str, dict[str, Any]]


def _texts(*names: str) -> list[Row]:
    return [(name, "text", {}) for name in names]


ENCODERS: list[Row] = [
    *_texts(
        "BertForSequenceClassification",
        "RobertaForSequenceClassification",
        "XLMRobertaForMaskedLM",
        "DistilBertForSequenceClassification",
        "AlbertForMaskedLM",
        "ElectraForSequenceClassification",
        "MPNetForMaskedLM",
        "DebertaV2ForSequenceClassification",
        "DebertaForMaskedLM",
        "ModernBertForMaskedLM",
        "CamembertForMaskedLM",
        "RoFormerForMaskedLM",
        "FNetForMaskedLM",
        "SqueezeBertForMaskedLM",
        "ConvBertForMaskedLM",
        "MobileBertForMaskedLM",
        "LayoutLMForTokenClassification",
        "NystromformerForMaskedLM",
        "YosoForMaskedLM",
        "RemBertForMaskedLM",
        "MegatronBertForMaskedLM",
        "IBertForMaskedLM",
        "FunnelForMaskedLM",
        "XLNetLMHeadModel",
        "LongformerForMaskedLM",
        "CanineForSequenceClassification",
    ),
    ("EsmForMaskedLM", "text", {"pad_token_id": 1, "mask_token_id": 4}),
    ("BigBirdForMaskedLM", "text", {"attention_type": "original_full"}),
]

DECODERS: list[Row] = [
    *_texts(
        "LlamaForCausalLM",
        "GPT2LMHeadModel",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "PhiForCausalLM",
        "Phi3ForCausalLM",
        "OPTForCausalLM",
        "BloomForCausalLM",
        "GPTNeoXForCausalLM",
        "GPTBigCodeForCausalLM",
        "FalconForCausalLM",
        "StableLmForCausalLM",
        "CohereForCausalLM",
        "OlmoForCausalLM",
        "Olmo2ForCausalLM",
        "GraniteForCausalLM",
        "Starcoder2ForCausalLM",
        "SmolLM3ForCausalLM",
        "MptForCausalLM",
        "XGLMForCausalLM",
        "BioGptForCausalLM",
        "CTRLLMHeadModel",
        "OpenAIGPTLMHeadModel",
        "GlmForCausalLM",
        "HeliumForCausalLM",
    ),
    ("GPTJForCausalLM", "text", {"rotary_dim": 4}),
    ("CodeGenForCausalLM", "text", {"rotary_dim": 4}),
    ("GPTNeoForCausalLM", "text", {"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
    ("NemotronForCausalLM", "text", {"num_key_value_heads": 2, "head_dim": 8}),
]

_LATENT = {
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}

EXPERTS: list[Row] = [
    *_texts(
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "OlmoeForCausalLM",
        "PhimoeForCausalLM",
        "GraniteMoeForCausalLM",
        "JetMoeForCausalLM",
        "GptOssForCausalLM",
    ),
    ("DeepseekV2ForCausalLM", "text", _LATENT | {"num_experts_per_tok": 2, "n_routed_experts": 4}),
    ("DeepseekV3ForCausalLM", "text", _LATENT | {"n_group": 2, "topk_group": 1}),
    ("SwitchTransformersForConditionalGeneration", "pair", {}),
]

STATE_SPACE: list[Row] = [
    *_texts(
        "MambaForCausalLM",
        "FalconMambaForCausalLM",
        "JambaForCausalLM",
        "RecurrentGemmaForCausalLM",
        "RwkvForCausalLM",
        "Lfm2ForCausalLM",
    ),
    ("Mamba2ForCausalLM", "text", {"num_heads": 8, "n_groups": 1, "state_size": 8}),
    ("FalconH1ForCausalLM", "text", {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}),
    (
        "BambaForCausalLM",
        "text",
        {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "attn_layer_indices": [1]},
    ),
]

ENCODER_DECODERS: list[Row] = [
    (name, "pair", {})
    for name in (
        "T5ForConditionalGeneration",
        "MT5ForConditionalGeneration",
        "BartForConditionalGeneration",
        "MBartForConditionalGeneration",
        "PegasusForConditionalGeneration",
        "PegasusXForConditionalGeneration",
        "MarianMTModel",
        "M2M100ForConditionalGeneration",
        "BlenderbotForConditionalGeneration",
        "BlenderbotSmallForConditionalGeneration",
        "LongT5ForConditionalGeneration",
        "UMT5ForConditionalGeneration",
        "PLBartForConditionalGeneration",
        "MvpForConditionalGeneration",
        "ProphetNetForConditionalGeneration",
        "FSMTForConditionalGeneration",
        "LEDForConditionalGeneration",
        "NllbMoeForConditionalGeneration",
    )
]

_WINDOWED = {"image_size": 64, "patch_size": 4, "window_size": 2, "embed_dim": 24, "hidden_size": 192}

VISION: list[Row] = [
    *(
        (name, "image", {})
        for name in (
            "ViTForImageClassification",
            "DeiTForImageClassification",
            "BeitForImageClassification",
            "Dinov2ForImageClassification",
            "ViTMAEForPreTraining",
            "ViTMSNForImageClassification",
            "IJepaForImageClassification",
            "SiglipVisionModel",
            "CLIPVisionModelWithProjection",
            "PvtForImageClassification",
            "PvtV2ForImageClassification",
        )
    ),
    ("SwinForImageClassification", "image64", _WINDOWED),
    ("Swinv2ForImageClassification", "image64", _WINDOWED),
    ("LevitForImageClassification", "image64", {"image_size": 64, "patch_size": 16}),
    ("PoolFormerForImageClassification", "image64", {"image_size": 64}),
    ("HieraForImageClassification", "image64", {"image_size": [64, 64]}),
    *(
        (name, "image64", {})
        for name in (
            "ConvNextForImageClassification",
            "ConvNextV2ForImageClassification",
            "ResNetForImageClassification",
            "RegNetForImageClassification",
            "MobileNetV1ForImageClassification",
            "MobileNetV2ForImageClassification",
            "MobileViTForImageClassification",
            "SegformerForSemanticSegmentation",
            "CvtForImageClassification",
            "BitForImageClassification",
            "FocalNetForImageClassification",
            "SwiftFormerForImageClassification",
        )
    ),
    ("MobileViTV2ForImageClassification", "image64", {"patch_size": 2}),
    ("EfficientNetForImageClassification", "image64", {"hidden_dim": 2560}),
    ("TimesformerForVideoClassification", "video", {"num_frames": 4}),
    ("VivitForVideoClassification", "video", {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    ("VideoMAEForVideoClassification", "video", {"num_frames": 4}),
    ("PatchTSTForPrediction", "series", {"context_length": 64, "num_input_channels": 2, "patch_length": 8}),
    ("PatchTSMixerForPrediction", "series", {"context_length": 64, "num_input_channels": 2, "patch_length": 8}),
]

_CONV = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}

AUDIO: list[Row] = [
    *(
        (name, "waveform", _CONV)
        for name in (
            "Wav2Vec2ForCTC",
            "HubertForCTC",
            "WavLMForCTC",
            "UniSpeechForCTC",
            "UniSpeechSatForCTC",
            "SEWForCTC",
            "Data2VecAudioForCTC",
        )
    ),
    (
        "WhisperForConditionalGeneration",
        "features",
        {"num_mel_bins": 8, "max_source_positions": 20, "begin_suppress_tokens": None, "suppress_tokens": None},
    ),
    (
        "Speech2TextForConditionalGeneration",
        "frames and text",
        {"input_feat_per_channel": 8, "conv_channels": 16, "num_conv_layers": 1, "conv_kernel_sizes": (3,)},
    ),
    ("ASTForAudioClassification", "spectrogram", {"max_length": 64, "num_mel_bins": 16, "patch_size": 8}),
    ("EncodecModel", "channel", {}),
    ("Wav2Vec2BertForCTC", "frames", {"feature_projection_input_dim": 8, "apply_spec_augment": False}),
]

_PICTURED = {"vision_config": {"image_size": 32, "patch_size": 8}}

MULTIMODAL: list[Row] = [
    ("CLIPModel", "image and text", {"text_config": {"eos_token_id": 2}, **_PICTURED}),
    ("SiglipModel", "image and text", dict(_PICTURED)),
    ("ChineseCLIPModel", "image and text", dict(_PICTURED)),
    ("AltCLIPModel", "image and text", dict(_PICTURED)),
    ("BlipForConditionalGeneration", "image and text", dict(_PICTURED)),
    ("GitForCausalLM", "image and text", dict(_PICTURED)),
    ("FlavaModel", "image and text", {}),
    ("ViltForMaskedLM", "image and text", {}),
    ("GroupViTModel", "image and text", {}),
]
