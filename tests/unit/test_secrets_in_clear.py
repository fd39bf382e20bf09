"""What is taken for a secret, and what is not: hidden by `--dry-run`, refused by `k8s render` and `check`."""

from __future__ import annotations

import pytest

from cputrain.secrets_in_clear import is_secret_name, looks_secret, shown, shown_value, shown_words

SECRET = """
HF_TOKEN HF_AUTH hub_token hub-token push_to_hub_token use_auth_token WANDB_API_KEY wandb.api_key api-key apiKey APIKEY
AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AZURE_CLIENT_SECRET PGPASSWORD MYSQL_PASSWD SSH_PASSPHRASE hftoken CREDENTIALS
GITHUB_PAT GITHUB_TOKEN_2 DB_PASSWORD1 google_credential BASIC_AUTH OAUTH Authorization SESSION_COOKIE JWT privateKey
CPUTRAIN_TOKEN COMET_API_KEY MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN clientSecret
"""
PLAIN = """
tokenizer_name TOKENIZERS_PARALLELISM tokenizer max_new_tokens include_tokens_per_second pad_token pad_token_id
decoder_start_token_id token_type_ids TokenClassification num_key_value_heads key_padding_mask HF_TOKEN_PATH eos_token
SSH_AUTH_SOCK SSL_KEY_FILE author authors keyboard monkey PATH PATIENCE PYTHONPATH OMP_NUM_THREADS lr secretary passes
per_token_loss
"""


@pytest.mark.parametrize("name", SECRET.split())
def test_a_secrets_name(name: str) -> None:
    assert is_secret_name(name)
    assert shown(name, "hush") == f"{name}=***"


@pytest.mark.parametrize("name", PLAIN.split())
def test_another_name(name: str) -> None:
    assert not is_secret_name(name)
    assert shown(name, "a value") == f"{name}=a value"


def test_values_that_look_like_secrets_are_hidden_whatever_their_name() -> None:
    token = "hf_" + "a" * 34
    assert looks_secret(token) and not looks_secret("hf_home")
    assert shown("NOTE", token) == "NOTE=***"
    assert shown_value("https://me:hush@proxy:1/x") == "https://***@proxy:1/x"
    assert shown_value("https://host/?a=b&token=hush&c=d#e") == "https://host/?a=b&token=***&c=d#e"
    assert shown_value("Authorization: Bearer abcdefghijklmnop") == "***"


def test_a_command_line() -> None:
    given = "run.py --hub_token hush --tokenizer_name bert --api-key=hush wandb.api_key=hush --use_auth_token --lr 1"
    words = [*given.split(), "http://me:hush@proxy", "--url=http://x/?a=b", "-c", "print(a == 'token')"]
    said = "run.py --hub_token *** --tokenizer_name bert --api-key=*** wandb.api_key=*** --use_auth_token --lr 1"
    assert shown_words(words) == [
        *said.split(), "http://***@proxy", "--url=http://x/?a=b", "-c", "print(a == 'token')",
    ]  # fmt: skip
