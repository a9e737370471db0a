"""The released types in which faults are planted: decoders, encoders of text, pictures and sound, encoder-decoders."""

_DECODERS = """
llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text gpt2 gpt_neo gpt_neox gptj gpt_bigcode opt
bloom mpt phi phi3 stablelm starcoder2 cohere cohere2 olmo olmo2 olmo3 granite granitemoe glm glm4 deepseek_v3 nemotron
persimmon codegen biogpt xglm smollm3 ernie4_5 helium hunyuan_v1_dense arcee apertus seed_oss exaone4 bitnet dots1 olmoe
"""
_ENCODERS = """
bert roberta distilbert albert electra mpnet esm modernbert camembert xlm-roberta ernie mobilebert rembert vit deit beit
dinov2 siglip_vision_model clip_vision_model hubert audio-spectrogram-transformer
"""
_BOTH = """
t5 mt5 umt5 bart mbart pegasus marian m2m_100 blenderbot whisper speech_to_text plbart
"""

ARCHITECTURES = tuple(f"{_DECODERS} {_ENCODERS} {_BOTH}".split())
