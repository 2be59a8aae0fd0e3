"""BlockMatMul: the product that its formula gives, the same bits with every instruction set and number of rows."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from runtime.backends.block_products import DOMAIN
from runtime.backends.instruction_sets import FORCED_SET, LIBRARY, instruction_set, instruction_sets, use_instruction_set
from runtime.errors import BackendError
from runtime.graphs.quantize import BLOCKS, Precision, Quantized, quantize
from tests.conftest import drawn
from tests.quantized_weights import unpack

TYPES = {"values": TensorProto.UINT8, "scales": TensorProto.FLOAT16, "zeros": TensorProto.UINT8}
KERNELS = LIBRARY.with_name("kernels")
DRIVER = Path(__file__).with_name("block_product.c")
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
precisions = st.builds(Precision, st.sampled_from([4, 8]), st.sampled_from(BLOCKS), st.booleans())


def session(
    bits: int, inputs: list[str], threads: int = 1, gated: bool = False, unsqueezed: bool = False
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(LIBRARY))
    node = helper.make_node(
        "BlockMatMul", inputs, ["out"], domain=DOMAIN, bits=bits, gated=int(gated), unsqueezed=int(unsqueezed)
    )
    infos = [helper.make_tensor_value_info(name, TYPES.get(name, TensorProto.FLOAT), None) for name in inputs if name]
    graph = helper.make_graph([node], "product", infos, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)])
    model.ir_version = onnx.IR_VERSION_2023_5_5
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds(packed: Quantized, rows: np.ndarray) -> dict[str, np.ndarray]:
    given = {"rows": rows, "values": packed.values, "scales": packed.scales}
    return given if packed.zero_points is None else given | {"zeros": packed.zero_points}


def product(packed: Quantized, precision: Precision, rows: np.ndarray) -> np.ndarray:
    """In double precision: rows rounded to 8 bits in blocks, times the codes around their zero points."""
    blocks, block = packed.values.shape[1], precision.block
    padded = np.zeros((len(rows), blocks * block), np.float32)
    padded[:, : rows.shape[1]] = rows
    parts = padded.reshape(len(rows), blocks, block)
    scales = np.abs(parts).max(axis=2) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.rint(parts * inverse[..., None]).astype(np.int64)
    zeros: np.ndarray | int = 1 << (precision.bits - 1)
    if packed.zero_points is not None:
        zeros = unpack(packed.zero_points, precision.bits)[:, :blocks, None].astype(np.int64)
    weights = unpack(packed.values, precision.bits).astype(np.int64) - zeros
    dots = np.einsum("mbi,nbi->mnb", codes, weights)
    return (dots * scales[:, None].astype(np.float64) * packed.scales[None].astype(np.float64)).sum(axis=2)


def activated(halves: np.ndarray) -> np.ndarray:
    """gate * sigmoid(gate) * up, in double precision, of rows [.., 2 K]."""
    gate, up = np.split(halves.astype(np.float64), 2, axis=-1)
    return gate / (1 + np.exp(np.minimum(-gate, 700))) * up


@pytest.fixture(autouse=True)
def fastest() -> Iterator[None]:
    """Whatever a test chose, the next one begins with the fastest set."""
    yield
    use_instruction_set(instruction_sets()[0])


@pytest.mark.parametrize("name", instruction_sets())
@given(
    precision=precisions,
    rows=st.integers(1, 9),
    n=st.integers(1, 70),
    k=st.integers(1, 600),
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([0.0, 1e-6, 1.0, 300.0]),
)
@settings(max_examples=drawn(60), deadline=None)
def test_it_is_the_product_of_what_was_rounded(
    name: str, precision: Precision, rows: int, n: int, k: int, seed: int, size: float
) -> None:
    rng = np.random.default_rng(seed)
    packed = quantize(rng.standard_normal((n, k)).astype(np.float32), precision)
    values = (rng.standard_normal((rows, k)) * size).astype(np.float32)
    given = feeds(packed, values)
    runs = session(precision.bits, list(given))
    use_instruction_set(name)
    (results,) = runs.run(None, given)
    (alone,) = runs.run(None, given | {"rows": values[-1:]})
    expected = product(packed, precision, values)
    assert np.abs(results - expected).max() <= 2e-5 * (np.abs(expected).max() + np.linalg.norm(values) + 1e-30)
    assert np.array_equal(alone[0], results[-1])


@given(
    precision=precisions,
    rows=st.integers(1, 130),
    n=st.integers(1, 200),
    k=st.integers(1, 1100),
    threads=st.integers(1, 3),
    gated=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=drawn(60), deadline=None)
def test_every_instruction_set_gives_the_same_bits(
    precision: Precision, rows: int, n: int, k: int, threads: int, gated: bool, seed: int
) -> None:
    given = random_feeds(precision, rows, n, k, np.random.default_rng(seed), gated)
    runs, results = session(precision.bits, list(given), threads, gated), {}
    for name in instruction_sets():
        use_instruction_set(name)
        results[name] = runs.run(None, given)[0]
    for name, result in results.items():
        assert np.array_equal(result, results["plain"]), name


@given(rows=st.integers(1, 9), k=st.integers(1, 300), seed=st.integers(0, 1 << 30), size=st.sampled_from([0.0, 1e-3, 3.0, 50.0]))
@settings(max_examples=drawn(40), deadline=None)
def test_gated_rows_are_the_activation_of_their_halves(rows: int, k: int, seed: int, size: float) -> None:
    rng, precision = np.random.default_rng(seed), Precision(8, 32)
    halves = (rng.standard_normal((rows, 2 * k)) * size).astype(np.float32)
    given = feeds(quantize(rng.standard_normal((20, k)).astype(np.float32), precision), halves)
    runs, plain = session(8, list(given), gated=True), session(8, list(given))
    expected = plain.run(None, given | {"rows": activated(halves).astype(np.float32)})[0]
    # Two float32 roundings of the activation can be a step of its 8 bits apart.
    steps = np.abs(activated(halves)).max() / 127 * np.float32(np.abs(given["scales"]).max()) * 128
    for name in instruction_sets():
        use_instruction_set(name)
        assert np.abs(runs.run(None, given)[0] - expected).max() <= 3 * steps + 1e-30


def test_the_activation_holds_at_the_ends_of_the_range_of_floats() -> None:
    gates = np.array([-3e38, -1e4, -88.5, -87.0, -1e-30, 0.0, 1e-30, 1.0, 87.0, 88.5, 1e4], np.float32)
    block, ups = 16, np.float32(2.0)
    halves = np.zeros((len(gates), 2 * block), np.float32)
    halves[:, 0], halves[:, block:] = gates, ups
    values = np.full((1, 1, block), 128, np.uint8)
    values[..., 0] = 129  # 1 for the first gate, 0 for the others
    given = {"rows": halves, "values": values, "scales": np.ones((1, 1), np.float16)}
    results = session(8, list(given), gated=True).run(None, given)[0][:, 0]
    np.testing.assert_allclose(results, activated(halves)[:, 0], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_codes_overflow_no_sum(bits: int) -> None:
    rows = np.full((9, 512), 2.0, np.float32)
    rows[0, ::2] = -2.0
    full, none = np.full((17, 2, 32 * bits), 255, np.uint8), np.zeros((17, bits // 4), np.uint8)
    given = {"rows": rows, "values": full, "scales": np.ones((17, 2), np.float16), "zeros": none}
    runs = session(bits, list(given))
    for name in instruction_sets():
        use_instruction_set(name)
        (results,) = runs.run(None, given)
        expected = np.broadcast_to(rows.sum(axis=1, keepdims=True) * (2**bits - 1), results.shape)
        np.testing.assert_allclose(results, expected, rtol=1e-6)


def random_feeds(
    precision: Precision, rows: int, n: int, k: int, rng: np.random.Generator, gated: bool = False
) -> dict[str, np.ndarray]:
    """Rows, and a matrix of any codes."""
    blocks = -(-k // precision.block)
    given = {"rows": rng.standard_normal((rows, k * (1 + gated))).astype(np.float32)}
    given["values"] = rng.integers(0, 256, (n, blocks, precision.block * precision.bits // 8), np.uint8)
    given["scales"] = rng.standard_normal((n, blocks)).astype(np.float16)
    if not precision.symmetric:
        given["zeros"] = rng.integers(0, 256, (n, -(-blocks * precision.bits // 8)), np.uint8)
    return given


def forced(name: str) -> subprocess.CompletedProcess[str]:
    code = "from runtime.backends.instruction_sets import instruction_set; print(instruction_set())"
    environment = os.environ | {FORCED_SET: name}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=DRIVER.parent.parent)


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCED_SET, raising=False)
    assert instruction_set() == instruction_sets()[0]
    assert [forced(name).stdout.strip() for name in instruction_sets()] == instruction_sets()
    assert "plain" in instruction_sets()


def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(BackendError, match=f"'mmx'.*{FORCED_SET}.*{', '.join(instruction_sets())}"):
        use_instruction_set("mmx")
    assert "BackendError" in forced("mmx").stderr


@pytest.fixture(scope="module")
def arm_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/block_product.c for arm64."""
    if not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)):
        pytest.skip(f"{ARM_COMPILER} or {ARM_EMULATOR} is not there")
    driver = tmp_path_factory.mktemp("arm") / "block_product"
    sources = [str(path) for path in [DRIVER, *KERNELS.glob("*.c")] if path.name != "operator.c"]
    flags = ["-O2", "-static", "-ffp-contract=off", "-fno-math-errno", f"-I{KERNELS}"]
    subprocess.run([ARM_COMPILER, *flags, *sources, "-lm", "-o", str(driver)], check=True)
    return driver


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "neon_dotprod", "neon_i8mm"])
def test_an_arm_processor_gives_the_same_bits(arm_driver: Path, name: str) -> None:
    rng, cases, expected = np.random.default_rng(7), [], []
    for bits, block in [(bits, block) for bits in (4, 8) for block in BLOCKS]:
        for rows, n, k, gated in [(1, 9, 300, False), (3, 5, 1, True), (7, 17, 700, True), (6, 70, 130, False)]:
            precision = Precision(bits, block, bool(rng.integers(2)))
            given = random_feeds(precision, rows, n, k, rng, gated)
            sizes = np.array([bits, block, rows, k, n, "zeros" in given, gated], np.uint64)
            cases += [sizes.tobytes(), *(array.tobytes() for array in given.values())]
            expected.append(session(bits, list(given), gated=gated).run(None, given)[0].ravel())
    done = subprocess.run(
        [ARM_EMULATOR, "-cpu", "max", str(arm_driver), name], input=b"".join(cases), capture_output=True, check=True
    )
    assert np.array_equal(np.frombuffer(done.stdout, np.float32), np.concatenate(expected))


@pytest.mark.long
def test_a_kernel_of_avx_vnni_uses_its_instructions(tmp_path: Path) -> None:
    compiler, objdump, built = shutil.which("gcc"), shutil.which("objdump"), tmp_path / "avxvnni.o"
    if os.uname().machine != "x86_64" or not compiler or not objdump:
        pytest.skip("no compiler or disassembler for x86-64")
    subprocess.run([compiler, "-O1", "-c", str(KERNELS / "avxvnni.c"), "-o", str(built)], check=True)
    listing = subprocess.run([objdump, "-d", str(built)], capture_output=True, text=True, check=True).stdout
    assert "{vex} vpdpbusd" in listing and "%zmm" not in listing


def test_threads_change_no_bit_and_leading_dimensions_stay() -> None:
    rng, precision = np.random.default_rng(3), Precision(4, 32)
    packed = quantize(rng.standard_normal((300, 256)).astype(np.float32), precision)
    given = feeds(packed, rng.standard_normal((2, 3, 256)).astype(np.float32))
    one, two = (session(4, list(given), threads).run(None, given)[0] for threads in (1, 2))
    assert one.shape == (2, 3, 300) and np.array_equal(one, two)


@pytest.mark.parametrize("unsqueezed", [False, True])
def test_bias_and_residual_are_added_after_the_product_in_this_order(unsqueezed: bool) -> None:
    rng, precision = np.random.default_rng(4), Precision(4, 32)
    given = feeds(
        quantize(rng.standard_normal((150, 64)).astype(np.float32), precision), rng.standard_normal((6, 64), np.float32)
    )
    terms = {"bias": rng.standard_normal(150, np.float32), "residual": rng.standard_normal((2, 3, 150), np.float32)}
    (plain,) = session(4, list(given)).run(None, given)
    runs = session(4, [*given, "", *terms], 2, unsqueezed=unsqueezed)
    (result,) = runs.run(None, given | terms)
    expected = (plain + terms["bias"]).reshape(2, 3, 150) + terms["residual"]
    assert result.shape == (1,) * unsqueezed + (2, 3, 150) and np.array_equal(result.reshape(expected.shape), expected)
    for name, wrong in (("bias", np.zeros(149, np.float32)), ("residual", np.zeros((2, 2, 150), np.float32))):
        with pytest.raises(Exception, match=name):
            runs.run(None, given | terms | {name: wrong})


def test_no_rows_are_no_results() -> None:
    given = feeds(quantize(np.ones((4, 32), np.float32), Precision(8, 32)), np.zeros((0, 32), np.float32))
    assert session(8, list(given)).run(None, given)[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("values", np.zeros((4, 2, 24), np.uint8), "blocks of 16, 32"),
        ("values", np.zeros((4, 3, 16), np.uint8), r"scales \[N, blocks\]"),
        ("scales", np.zeros((3, 2), np.float16), r"scales \[N, blocks\]"),
        ("rows", np.zeros((1, 65), np.float32), "cover K"),
        ("zeros", np.zeros((4, 2), np.uint8), "zero points"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, wrong: np.ndarray, told: str) -> None:
    packed = quantize(np.ones((4, 64), np.float32), Precision(4, 32, False))
    given = feeds(packed, np.ones((1, 64), np.float32))
    with pytest.raises(Exception, match=told):
        session(4, list(given)).run(None, given | {name: wrong})


def test_gated_rows_without_two_halves_are_refused() -> None:
    given = feeds(quantize(np.ones((4, 64), np.float32), Precision(4, 32)), np.ones((1, 127), np.float32))
    with pytest.raises(Exception, match=r"gated rows \[..., 2 K\]"):
        session(4, list(given), gated=True).run(None, given)


def test_other_bits_are_refused() -> None:
    with pytest.raises(Exception, match="4 and 8 bits"):
        session(5, ["rows", "values", "scales"])


def test_a_product_gives_its_memory_back() -> None:
    """Its room for rounded rows takes 1 MiB here."""
    given = feeds(quantize(np.ones((16, 2048), np.float32), Precision(8, 32, False)), np.ones((512, 2048), np.float32))
    run, held = session(8, list(given)), []
    for _ in range(48):
        run.run(None, given)
        held.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))
    assert held[-1] - held[3] < 16 << 20
