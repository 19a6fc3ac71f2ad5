"""The page about diffusers: its Python runs as one script, and its numbers are those of the run."""

import difflib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.root import ROOT

accelerate = pytest.importorskip("accelerate", reason="accelerate is the framework that this page is about")
pytest.importorskip("diffusers", reason="diffusers is the framework that this page is about")

PAGE = (ROOT / "docs" / "diffusers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Accelerate keeps one state per process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_both_loops_run_and_save_the_same_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 4
    names: dict[str, object] = {"__name__": "docs"}
    exec("\n".join(BLOCKS), names)
    steps, apart = capsys.readouterr().out.split()[-2:]
    assert f"After {steps} steps" in PAGE
    (bound,) = re.findall(r"differ by less than (\S+): roundings", PAGE)
    assert float(apart) < float(bound) < 1e-6
    moved = names["before"]["conv_in.weight"] - names["unet"].state_dict()["conv_in.weight"]  # type: ignore[index,attr-defined]
    assert moved.abs().max() > 1e-4  # an average that is the weights would be equal too


def test_the_page_counts_the_lines_that_differ() -> None:
    before, after = (block.splitlines() for block in BLOCKS[1:3])
    lines = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    assert f"The difference is +{added} and −{removed} lines." in PAGE


# The diff -------------------------------------------------------------------------------------------------------------

HUNKS = re.findall(r"^@@ (.*?) @@\n((?:[-+].*\n)*)", re.search(r"```diff\n(.*?)```", PAGE, re.S)[1], re.M)  # type: ignore[index]


def added(number: int) -> str:
    """Return the lines that a hunk adds."""
    return "".join(line[1:] + "\n" for line in HUNKS[number][1].splitlines() if line.startswith("+"))


def script() -> str:
    """A script with the places of diffusers' one, small, and what the diff adds put there."""
    return f"""
import os
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
{added(0)}
def main(args):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def save(models, weights, folder):
        for model in models:
            model.save_pretrained(os.path.join(folder, "unet"))
            weights.pop()

    def load(models, folder):
        models.pop().load_state_dict(UNet2DModel.from_pretrained(folder, subfolder="unet").state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    torch.manual_seed(0)
    model = args.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if args.use_ema:
{added(3)}
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    if args.resume:
        accelerator.load_state(args.resume)
    for step in range(args.first, args.last):
        dice = torch.Generator().manual_seed(step)
        noise = torch.randn(4, 1, 8, 8, generator=dice)
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(noise, 7).sample, noise))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(args.output_dir + "/state")
    if accelerator.is_main_process:
        if True:
                unet = accelerator.unwrap_model(model)
{added(6)}
                    pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
                    images = pipeline(batch_size=1, num_inference_steps=2, output_type="np").images
{added(7)}
                    pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
                    pipeline.save_pretrained(args.output_dir)
    return unet, images, belay if args.use_ema else None
"""


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_script_with_the_lines_of_the_diff_saves_the_average_and_resumes(tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "script"}
    exec(script(), names)
    unet_class = names["UNet2DModel"]

    def run(folder: str, first: int, last: int, *, resume: str = "", use_ema: bool = True) -> tuple[dict, dict]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        small = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        network = lambda: unet_class(block_out_channels=(8, 8), **small, **blocks)  # noqa: E731
        args = SimpleNamespace(
            network=network,
            first=first,
            last=last,
            use_ema=use_ema,
            output_dir=f"{tmp_path}/{folder}",
            resume=resume,
            ema_max_decay=0.9999,
            ema_inv_gamma=1.0,
            ema_power=3 / 4,
        )
        unet, images, belay = names["main"](args)
        assert images.shape[0] == 1
        saved = unet_class.from_pretrained(f"{tmp_path}/{folder}/unet").state_dict()
        if use_ema:
            assert belay.step == last // 2
            torch.testing.assert_close(saved, belay.average_state_dict(), rtol=0, atol=0)
        return saved, unet.state_dict()

    whole, weights = run("whole", 0, 12)
    run("half", 0, 6)
    resumed, again = run("rest", 6, 12, resume=f"{tmp_path}/half/state")
    torch.testing.assert_close([resumed, again], [whole, weights], rtol=0, atol=0)
    assert not torch.equal(whole["conv_in.weight"], weights["conv_in.weight"])
    plain, same = run("plain", 0, 12, use_ema=False)
    torch.testing.assert_close([plain, same], [weights, weights], rtol=0, atol=0)


def test_the_page_counts_the_lines_of_the_diff() -> None:
    assert len(HUNKS) == 8
    lines = [line for _, hunk in HUNKS for line in hunk.splitlines()]
    more = sum(line.startswith("+") for line in lines)
    less = sum(int(re.search(r"\((\d+) lines?\)$", line)[1]) for line in lines if line.startswith("-"))  # type: ignore[index]
    assert f"That is +{more} and −{less} lines." in PAGE
