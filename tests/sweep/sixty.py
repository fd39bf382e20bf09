"""The models that `make test` sweeps: chosen by popularity and structure, one setting each.

The settings go round: each class gets the next of the twelve, with its place in the list as the seed.
"""

from __future__ import annotations

from tests.sweep.cases import Case, cases_of

SIXTY: list[tuple[str, str]] = [
    ("bert", "BertForSequenceClassification"),
    ("roberta", "RobertaForMaskedLM"),
    ("distilbert", "DistilBertForQuestionAnswering"),
    ("albert", "AlbertForPreTraining"),
    ("electra", "ElectraForTokenClassification"),
    ("deberta-v2", "DebertaV2ForMaskedLM"),
    ("deberta", "DebertaForSequenceClassification"),
    ("mpnet", "MPNetForMultipleChoice"),
    ("xlm-roberta", "XLMRobertaForMultipleChoice"),
    ("camembert", "CamembertForTokenClassification"),
    ("modernbert", "ModernBertForMaskedLM"),
    ("nomic_bert", "NomicBertModel"),
    ("bart", "BartForConditionalGeneration"),
    ("mbart", "MBartForQuestionAnswering"),
    ("pegasus", "PegasusForConditionalGeneration"),
    ("marian", "MarianMTModel"),
    ("t5", "T5ForConditionalGeneration"),
    ("mt5", "MT5ForTokenClassification"),
    ("t5gemma2", "T5Gemma2ForConditionalGeneration"),
    ("prophetnet", "ProphetNetForConditionalGeneration"),
    ("gpt2", "GPT2LMHeadModel"),
    ("gpt_neox", "GPTNeoXForCausalLM"),
    ("gpt_neo", "GPTNeoForSequenceClassification"),
    ("gptj", "GPTJForCausalLM"),
    ("opt", "OPTForCausalLM"),
    ("bloom", "BloomForTokenClassification"),
    ("falcon", "FalconForCausalLM"),
    ("llama", "LlamaForCausalLM"),
    ("mistral", "MistralForSequenceClassification"),
    ("mixtral", "MixtralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForSequenceClassification"),
    ("gemma", "GemmaForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3_text", "Gemma3ForCausalLM"),
    ("phi", "PhiForCausalLM"),
    ("phi3", "Phi3ForTokenClassification"),
    ("starcoder2", "Starcoder2ForCausalLM"),
    ("gpt_bigcode", "GPTBigCodeForCausalLM"),
    ("gpt_oss", "GptOssForCausalLM"),
    ("xlm", "XLMForQuestionAnsweringSimple"),
    ("flaubert", "FlaubertForSequenceClassification"),
    ("xlnet", "XLNetForSequenceClassification"),
    ("big_bird", "BigBirdForMaskedLM"),
    ("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration"),
    ("longformer", "LongformerForMaskedLM"),
    ("layoutlm", "LayoutLMForTokenClassification"),
    ("vit", "ViTForImageClassification"),
    ("deit", "DeiTForImageClassification"),
    ("beit", "BeitForImageClassification"),
    ("dinov2", "Dinov2ForImageClassification"),
    ("swin", "SwinForImageClassification"),
    ("convnext", "ConvNextForImageClassification"),
    ("clip", "CLIPModel"),
    ("siglip", "SiglipModel"),
    ("detr", "DetrForObjectDetection"),
    ("wav2vec2", "Wav2Vec2ForCTC"),
    ("hubert", "HubertForSequenceClassification"),
    ("whisper", "WhisperForConditionalGeneration"),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
]


def cases() -> list[list[Case]]:
    """For each model one setting of the results, one of dropout, and the restoring."""
    found = []
    for place, (model, kind) in enumerate(SIXTY):
        every = cases_of(model, kind, seed=place)
        results = [case for case in every if case.what == "results"]
        drops = [case for case in every if case.what == "dropout"]
        found.append([results[place * 7 % len(results)], drops[place % len(drops)], every[-1]])
    return found
