"""Several processes with gloo on the CPU against one process on the same batch."""
import multiprocessing
import os
import sys
import traceback
import pytest
import torch
import torch.distributed.run
from files import (FEW, LIMIT, MINE, assert_same_run, checkpoint_of, counters_of, metrics_of)
from models import small_model
from runs import begin, trained, trains, well_ended
from steps import parts, rollout_of
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore
from torch.distributed.fsdp import FSDPModule
import sample
import train

FLAGS = (*FEW, "--steps=3", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=12",
         "--eval-limit=5", "--eval-every=2", "--save-every=1", "--micro-batch-tokens=150",
         "--updates-per-rollout=2", f"--reward={MINE}:score")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("one"), *FLAGS)


def test_ranks_compute_what_one_does_also_after_a_kill(one, tmp_path):
    """Rank 1 is killed in step 2; the run comes back, and ends as if nothing had been."""
    folder = tmp_path / "run"
    torchrun = torch.distributed.run.__file__, "--nproc-per-node=2", "--max-restarts=3"
    kill = dict(FAULT="SIGKILL", FAULT_AT="3")            # in the first attempt
    done = begin(*torchrun, "train.py", *FLAGS, f"--output={folder}", "--resume=auto", **kill)()
    assert "from step 0" in well_ended(done) and "from step 1" in done.stdout
    assert_same_run(folder, one)
    assert done.stdout.count("question  ") == 1           # only rank 0 speaks
    assert len(metrics_of(folder)) == 4                   # and writes


def test_prompts_need_not_divide(tmp_path):
    """Three on two ranks: what one process computes."""
    runs = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        well_ended(begin("train.py", *FLAGS, "--prompts-per-step=3", f"--output={folder}",
                         ranks=ranks)())
        runs.append([m["grad_norm"] for m in metrics_of(folder)[1:]])
    assert runs[0] == pytest.approx(runs[1], rel=1e-3) and len(set(runs[0])) > 2


WHOLE = dict(WORLD_SIZE="2", RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")


def tell(monkeypatch, variables):
    """As torchrun tells them; train.py has read two of these when it was imported."""
    for name, value in variables.items():
        if name in ("RANK", "WORLD_SIZE"):
            nothing = {"RANK": 0, "WORLD_SIZE": 1}[name]
            monkeypatch.setattr(train, name, int(value or nothing))
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("told", [
    *({name: value for name, value in WHOLE.items() if name != missing}
      for missing in (*WHOLE,)[1:]), dict(WORLD_SIZE="2"), dict(RANK="1"),
    dict(RANK="3", WORLD_SIZE=""), {**WHOLE, "RANK": "2"}, dict(WORLD_SIZE="0"),
    dict(WORLD_SIZE="1", RANK="1", LOCAL_RANK="1")])
def test_variables_of_torchrun_that_are_set_in_part(monkeypatch, capsys, told):
    monkeypatch.setattr(os, "_exit", sys.exit)
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    tell(monkeypatch, told)
    with pytest.raises(SystemExit) as end:
        sys.exit(train.main(FLAGS))
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1
    assert "torchrun's variables" in err


@pytest.mark.parametrize("told", [
    dict(MASTER_ADDR="here", MASTER_PORT="5"), dict(RANK="0"), dict(LOCAL_RANK="3"),
    dict(WORLD_SIZE="1"), dict(WORLD_SIZE="", RANK="")])
def test_variables_that_mean_one_process_have_no_effect(monkeypatch, told):
    tell(monkeypatch, told)
    assert train.join_ranks(train.Settings()) is None
    monkeypatch.setattr(train, "WORLD_SIZE", 32)                # of a machine that is planned
    trains("--dry-run=80", "--prompts-per-step=32")


def test_a_signal_to_rank_1_ends_both_and_one_goes_on(one, tmp_path):
    """It came before the rewards of step 2 were given, which is left to the run that goes on."""
    folder = tmp_path / "run"
    done = begin("train.py", *FLAGS, f"--output={folder}", ranks=2, FAULT="SIGTERM", FAULT_AT="3")()
    assert "stopped after step 1; continue with" in done.stdout, done.stderr
    assert counters_of(folder)["step"] == 1
    trains(f"--resume={folder}")
    assert_same_run(folder, one)


STAGES = ("load_data", "save_checkpoint", "renew_twin", "gradient_step", "evaluate",
          "leave_ranks")
fork = multiprocessing.get_context("fork")


def ended(processes):
    """Start them, wait -> their statuses; what hangs is killed."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        process.kill()
    return [process.exitcode for process in processes]


def becomes_rank(rank, ranks, port):
    train.RANK, train.WORLD_SIZE = int(rank), int(ranks)
    os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="localhost",
                       MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def fails_at(stage, fault, rank, port, log, flags):
    """A rank of two that trains; on rank 1 the first collective of the stage raises the fault."""
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w", 1)
    becomes_rank(rank, "2", port)

    def faulty(real):
        def collective(*given, **how):
            inside = [real.__name__, *(frame.name for frame in traceback.extract_stack())]
            if rank == "1" and stage in inside:
                raise fault
            return real(*given, **how)
        return collective

    for name in ("all_gather_object", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier"):
        setattr(train.dist, name, faulty(getattr(train.dist, name)))
    for name in ("whole_of", "load_data"):             # the latter has none
        setattr(train, name, faulty(getattr(train, name)))
    FSDPModule.unshard = faulty(FSDPModule.unshard)
    os._exit(train.main(flags))


@pytest.mark.parametrize("stage, fault", [*zip(STAGES, 2 * [
    train.BadInput("oh"), MemoryError(), RuntimeError("nobody expects this")])])
def test_a_fault_of_one_rank_ends_both_at_once(tmp_path, stage, fault):
    folder, log = tmp_path / "run", tmp_path / "log"
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    flags = [*FLAGS[:2], "--steps=1", "--prompts-per-step=2", "--group-size=2", "--eval-limit=2",
             "--max-new-tokens=6", f"--output={folder}"]
    codes = ended([fork.Process(target=fails_at, args=(stage, fault, rank, store.port, log, flags))
                   for rank in "01"])
    text = log.read_text()
    assert codes == [2, 2] and text.count("rank 1: ") == 1, text
    if isinstance(fault, RuntimeError):                   # else the other rank's may be foreign
        assert "Traceback" in text
    if (folder / "checkpoint.safetensors").exists():
        trains(f"--resume={folder}")


def test_lora_on_two_ranks_is_that_of_one(tmp_path):
    """Whole weights and equal factors on both; a run of two goes on as one."""
    flags = (*FLAGS, "--lora-rank=4", "--lr=0.003")
    one, two = tmp_path / "one", tmp_path / "two"
    end = begin("train.py", *flags, "--steps=2", f"--output={two}", ranks=2)
    trains(*flags, f"--output={one}")
    well_ended(end())
    trains(f"--resume={two}", "--steps=3")
    assert_same_run(two, one)
    expected, found = (load_file(folder / "adapter" / "adapter_model.safetensors")
                       for folder in (one, two))
    for name, factor in expected.items():
        assert (found[name] - factor).norm() < 0.01 * factor.norm()


def test_two_ranks_in_bfloat16_lose_no_step(tmp_path):
    """bfloat16 shards, float32 masters over them; the reference runs as the policy does."""
    folder = tmp_path / "run"
    well_ended(begin("train.py", *FLAGS, "--dtype=bfloat16", "--steps=2",
                     "--updates-per-rollout=1", f"--output={folder}", ranks=2)())
    first, last = metrics_of(folder)[1:]
    assert first["approx_kl"] == 0 < last["approx_kl"]
    saved = checkpoint_of(folder)
    saved.pop("counters")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


def gradient_of(rank, port, folder):
    """One of three ranks: the gradients of a sharded model, whose loss is tiny on ranks 1 and 2."""
    becomes_rank(rank, "3", port)
    s = train.parse(["--device=cpu", "--dtype=bfloat16"])
    train.join_ranks(s)
    model = small_model("qwen2").bfloat16()
    twin = train.twin_of(model, s)
    model = train.shard(model, s)
    train.renew_twin(train.Parts(model, *[None] * 5, twin=twin))
    assert all(map(train.is_sharded, model.parameters()))  # again
    backward_of(model, 1 if rank == "0" else 2**-9)
    found = {name: train.whole_of(p.grad) for name, p in model.named_parameters()}
    if rank == "0":
        save_file(found, folder / "found.safetensors")
    train.leave_ranks(0)  # with a barrier: nobody leaves while another one still receives


def backward_of(model, factor):
    logits = model(torch.arange(2, 18).view(2, 8)).logits
    (logits.float().square().sum() * factor).backward()


def test_gradients_of_bfloat16_are_summed_in_float32(tmp_path):
    """1 + 2^-9 + 2^-9 is 1 in bfloat16, if it is summed one by one."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ended([fork.Process(target=gradient_of, args=(rank, store.port, tmp_path)) for rank in "012"])
    model = small_model("qwen2").bfloat16()
    backward_of(model, 1)
    found = load_file(tmp_path / "found.safetensors")
    for name, p in model.named_parameters():
        expected = (p.grad.float() * (1 + 2**-8) / 3).bfloat16()
        assert (found[name] == expected).float().mean() > 0.99, name


def test_a_rank_with_fewer_micro_batches_counts_no_token_twice(monkeypatch):
    p = parts("--micro-batch-tokens=60")
    rollout = rollout_of(p)
    alone = len(list(train.micro_batches(p.policy_model, rollout, p.settings)))
    monkeypatch.setattr(train, "from_all_ranks", lambda n: [n, n + 2])
    found = list(train.micro_batches(p.policy_model, rollout, p.settings))
    assert len(found) == alone + 2
    masks = [sample.take(rollout, rows, width).mask for rows, width in found]
    assert sum(int(mask.sum()) for mask in masks) == rollout.mask.sum()
    for options in ((), ("--no-fast",)):
        p = parts("--micro-batch-tokens=60", *options)
        last = list(train.micro_batches(p.policy_model, rollout, p.settings))[-1]
        logp, entropy = train.micro_batch_logprobs(p.policy_model, rollout, *last, p.settings, True)
        logp.sum().backward()                             # runs through every layer
        assert logp.tolist() == entropy.tolist() == [[0]]
        assert all(not weight.grad.any() for weight in p.policy_model.parameters())
