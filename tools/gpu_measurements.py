"""The measurements that `tools/gpu.py` takes, in the order in which it takes them."""

from session import Measurement

__all__ = ["MEASUREMENTS"]

CORE = ("torch", "numpy", "cloudpickle", "msgspec", "psutil", "pynvml", "rich")
TESTS = (*CORE, "pytest", "hypothesis", "typer")
PICTURES = (*CORE, "PIL")
FUSE = ("src/shoal/fuse",)
SEARCH = (
    *FUSE, *(f"src/shoal/{name}" for name in (
        "algorithms", "core", "host", "plan", "run", "study", "train", "api.py", "task.py",
    )),
)  # fmt: skip
"""What a search runs."""
RIVALS = ("benchmarks/models", "benchmarks/rivals")
SEARCHED = (*SEARCH, *RIVALS, "benchmarks/searches.py", "benchmarks/search_tasks")


def _search(
    name: str,
    title: str,
    least: int,
    most: int,
    *searches: str,
    needs: tuple[str, ...] = CORE,
    toy_ways: tuple[str, ...] = ("plain", "pool", "empty", "full"),
) -> Measurement:
    command = ("benchmarks/searches.py", "--rounds", "1", "--searches", *searches)
    quick = (*command, "--quick", "--ways", *toy_ways)
    return Measurement(name, title, least, most, (*command, "--device", "cuda:0"), quick, SEARCHED, needs)


def _fusion(name: str, title: str, dtype: str) -> Measurement:
    command = (
        "benchmarks/fusion.py", "--models", "resnet18", "transformer", "bert-medium", "dcgan",
        "pointnet-classification", "mobilenet", "--rivals", "serial", "serial, torch.compile", "processes", "vmap",
        "Shoal", "--sizes", "8", "--largest", "--seconds", "0.6", "--rounds", "3", "--budget", "{seconds}", "--dtype",
        dtype,
    )  # fmt: skip
    quick = ("benchmarks/fusion.py", "--models", "mlp", "--dtype", dtype, "--quick")
    code = (*FUSE, *RIVALS, "benchmarks/fusion.py")
    return Measurement(name, title, 150, 540, command, quick, code, (*CORE, "transformers"))


def _tests(name: str, title: str, least: int, most: int, *arguments: str) -> Measurement:
    command = ("tools/gpu_tests.py", *arguments)
    files = tuple(each for each in arguments if each.endswith(".py"))
    quick = ("tools/gpu_tests.py", *(each for each in files if each.startswith("tests/gpu/")))
    return Measurement(
        name, title, least, most, command, quick, (*SEARCH, "src/shoal/pack", "tests/gpu", *files), TESTS
    )


MEASUREMENTS = (
    _search("search-8", "1. A search of 8 ResNet-18", 60, 180, "8 ResNet-18"),
    _search("search-32", "1. A search of 32 ResNet-18", 120, 300, "32 ResNet-18", toy_ways=("pool", "empty")),
    _search(
        "halving", "2. The same with halving", 120, 300, "32 ResNet-18, halving", "8 ResNet-18, halving",
        toy_ways=("plain", "pool", "empty"),
    ),
    _fusion("fusion", "4. Fusion, float32", "float32"),
    _fusion("fusion-bf16", "4. Fusion, bfloat16", "bfloat16"),
    Measurement(
        "lora", "5. LoRA on a Llama of the sizes of 3.2 1B", 90, 300,
        (
            "benchmarks/fusion.py", "--models", "lora-mixed", "--rivals", "serial", "processes", "peft, in turns",
            "Shoal", "--sizes", "8", "16", "--seconds", "3", "--rounds", "2", "--no-compile",
        ),
        ("benchmarks/fusion.py", "--models", "lora-mixed", "--rivals", "serial", "peft, in turns", "Shoal", "--quick"),
        (*FUSE, *RIVALS, "benchmarks/fusion.py"), (*CORE, "transformers", "peft"),
    ),
    _search(
        "small-searches", "6. Searches of 64 perceptrons and of 24 BERT-Tiny", 60, 240, "64 perceptrons",
        "24 BERT-Tiny", needs=(*CORE, "transformers"),
    ),
    Measurement(
        "placement", "7. Placement: jobs of HyperSack's first search space", 240, 420,
        (
            "benchmarks/placement.py", "sp1", "--devices", "cuda:0", "--rows", "plain processes", "one job per device",
            "ff", "mps + ffd", "fusion", "fusion + packing",
        ),
        ("benchmarks/placement.py", "sp1", "--quick", "--rows", "plain processes", "fusion + packing"),
        (*SEARCH, *RIVALS, "benchmarks/placement.py", "benchmarks/placed", "benchmarks/packs/pictures.py",
         "benchmarks/search_tasks"),
        PICTURES,
    ),
    Measurement(
        "packs", "8. Packs with PNG files", 60, 180,
        (
            "benchmarks/packing.py", "--device", "cuda:0", "--parts", "ablation", "--pipelines", "png", "--cases",
            "none", "model", "all", "--sizes", "8", "--rounds", "4", "--seconds", "4",
        ),
        ("benchmarks/packing.py", "--quick"),
        (*FUSE, *RIVALS, "src/shoal/pack", "src/shoal/train", "benchmarks/packing.py", "benchmarks/packs"),
        PICTURES,
    ),
    _tests(
        "tests", "9. Tests marked gpu", 120, 420, "tests/gpu/test_gpu_steps.py", "tests/gpu/test_gpu_studies.py",
        "tests/gpu/test_gpu_packs.py", "tests/gpu/test_gpu_devices.py", "tests/gpu/test_gpu_workspaces.py",
        "tests/fuse/test_optim.py", "tests/fuse/test_rules.py", "-n", "4",
    ),
    _tests(
        "suspension", "10. Suspension, memory freed, the death of MPS", 60, 180, "tests/gpu/test_gpu_memory.py",
        "tests/gpu/test_gpu_jobs.py", "tests/train/test_checkpoint_writer.py", "tests/train/test_suspend_resume.py",
    ),
)  # fmt: skip
"""In the order in which they are taken."""
