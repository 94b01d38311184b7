"""Probes: questions to this machine, each asked in a process of its own. A library that crashes on import, or loads the wrong
shared library, then harms nothing but its own answer.

Every probe prints one JSON object; what it raises comes back as {"fault": ...}.
"""

from __future__ import annotations

import json
import subprocess
import sys

_SECONDS = 180  # importing Transformer Engine and compiling nothing takes 20 s on a cold disk

_FRAME = """
import json, sys
sys.path[:] = {path!r}
def probe():
{body}
try:
    told = probe()
except BaseException as fault:
    told = {{"fault": type(fault).__name__ + ": " + " ".join(str(fault).split())[:300]}}
print("\\n@" + json.dumps(told))
"""

TORCH = """
    import torch
    told = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "gpus": []}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            told["gpus"].append({"name": gpu.name, "capability": [gpu.major, gpu.minor], "bytes": gpu.total_memory})
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return told
"""

TE = """
    from packfp8.model import te
    te.library()
    extension = sys.modules["transformer_engine_torch"]
    number = int(extension.get_cudnn_version())
    with open("/proc/self/maps") as maps:
        files = sorted({line.split()[-1] for line in maps if "libcudnn" in line and line.split()[-1].startswith("/")})
    recipes = []
    for name in te.RECIPE_CLASSES:
        try:
            te.make_recipe(name)
            recipes.append(name)
        except ValueError:
            pass
    faults = [[fault.name, fault.effect, ".".join(map(str, fault.fixed_in))] for fault in te.known_faults() if fault.present]
    return {"version": te.version(), "cudnn": number, "cudnn_files": files, "recipes": recipes, "faults": faults}
"""

ATTENTION = """
    import os
    os.environ["NVTE_DEBUG"], os.environ["NVTE_DEBUG_LEVEL"] = "1", "2"
    import contextlib, io
    import torch
    from packfp8.model import te
    log = io.StringIO()
    with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
        layer = te.library().DotProductAttention(16, 128, qkv_format="thd", attn_mask_type="padding_causal")
        q, k, v = (torch.randn(256, 16, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
        offsets = torch.tensor([0, 64, 192, 256], dtype=torch.int32, device="cuda")
        layer(q, k, v, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=128, max_seqlen_kv=128).sum().backward()
        torch.cuda.synchronize()
    text = log.getvalue()
    running = [line.split("Running with ")[1].strip() for line in text.splitlines() if "Running with " in line
               and "Running with config" not in line]
    why = [line.split("]:")[-1].strip() for line in text.splitlines() if "Disabling FusedAttention" in line]
    return {"backend": running[-1] if running else "", "why": why[-1] if why else ""}
"""

TORCHAO = """
    import warnings
    warnings.simplefilter("ignore")
    from packfp8.model import float8
    float8.library()
    return {}
"""


def ask(body: str) -> dict:
    """What a probe tells; {"fault": why} where it fails, crashes or does not end."""
    script = _FRAME.format(path=sys.path, body=body)
    try:
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"fault": f"no answer within {_SECONDS} s"}
    answers = [line[1:] for line in run.stdout.splitlines() if line.startswith("@")]
    if answers:
        return json.loads(answers[-1])
    last = run.stderr.strip().splitlines()[-1:] or ["no output"]
    return {"fault": f"the process ended with code {run.returncode}: {last[0][:300]}"}
