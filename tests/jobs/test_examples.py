"""The examples run as their README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import traces
from start_jobs import HANG_SECONDS, lean, told

EXAMPLES = Path(__file__).parents[2] / "examples"
MNIST = EXAMPLES / "mnist"


@pytest.fixture(autouse=True)
def without_network(monkeypatch, tmp_path_factory):
    """Uses scikit-learn's small data set on every machine; MNIST would take minutes."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # a port without a server
    monkeypatch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))


def keras_dist(*words):
    """Runs the command line in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "keras_dist.launch.cli", *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS,
        env=lean("sklearn"),
    )


@pytest.mark.short
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_mnist(tmp_path, ranks):
    checkpoint, timeline = tmp_path / "mnist.keras", tmp_path / "t.json"
    options = ["--epochs", 2, "--checkpoint", checkpoint]
    program = [sys.executable, MNIST / "train.py", *options]
    job = keras_dist("run", "-np", ranks, "--timeline", timeline, *program)
    said = told(
        job,
        r"Trained on .+ with (\d) ranks?: [\d,]+ images/s in total, "
        r"test accuracy (\d+\.\d)%, all replicas are equal\.",
    )
    assert int(said[1]) == ranks
    assert float(said[2]) > 25  # percent, after two epochs of scikit-learn's digits; chance is 10
    assert job.stdout.count("Epoch 2/2") == 1
    assert sorted(tmp_path.iterdir()) == [checkpoint, timeline]
    reduced = traces.bars(traces.load(timeline), "the reduction of gradients")
    assert {bar["pid"] for bar in reduced} == (set() if ranks == 1 else {0, 1})
    report = keras_dist("timeline", timeline)
    assert report.returncode == 0, report.stdout
    lines = re.findall(r"^ *\d on ", report.stdout, re.MULTILINE)
    assert len(lines) == 2 * ranks, report.stdout  # of a step, and of the whole time


@pytest.mark.slow
def test_mnist_on_another_backend(run_ranks):
    environment = lean("sklearn", KERAS_BACKEND="torch")
    job = run_ranks(2, str(MNIST / "train.py"), "--epochs", "2", env=environment)
    said = told(job, r"Trained on .+ test accuracy (\d+\.\d)%, all replicas are equal\.")
    assert float(said[1]) > 25
    assert job.stdout.count("Epoch 2/2") == 1


def test_mnist_with_a_loop_by_hand(run_ranks):
    options = ["--epochs", "2"]
    job = run_ranks(2, str(MNIST / "train_custom_loop.py"), *options, env=lean("sklearn"))
    said = told(
        job,
        r"Trained on .+ with 2 ranks: test accuracy (\d+\.\d)%, all replicas are equal\.",
    )
    assert float(said[1]) > 25


@pytest.mark.slow
def test_mnist_with_a_tape(run_ranks, tmp_path):
    options = (
        "--epochs 2 --batch_size 32 --lr 0.002 --device cpu --num_inter 1 --num_intra 1".split()
    )
    options += ["--warmup_epochs", "1", "--fp16-allreduce", "--checkpoint_dir", str(tmp_path)]
    job = run_ranks(2, str(MNIST / "train_tape.py"), *options, env=lean("sklearn"))
    said = told(job, r"Trained on .+ with 2 ranks: test accuracy (\d+\.\d)%\.")
    assert float(said[1]) > 25
    assert job.stdout.count("epoch 2: loss ") == 1
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.slow
def test_cifar10(run_ranks):
    options = "--made 1000 --epochs 3 --width 8 --batch-size 25 --warmup-epochs 1".split()
    job = run_ranks(2, str(EXAMPLES / "cifar10" / "train.py"), *options, env=lean())
    said = told(job, r"Trained on made pictures with 2 ranks: test accuracy (\d+\.\d)%\.")
    assert float(said[1]) > 25
    assert job.stdout.count("epoch 3: loss ") == 1


@pytest.mark.slow
def test_synthetic_benchmark_of_tensorflow(run_ranks):
    script = EXAMPLES / "synthetic" / "tensorflow_benchmark.py"
    options = "--model MLP --batch-size 8 --image-size 8 --num-iters 2 --num-batches-per-iter 2"
    options = [*options.split(), "--num-warmup-batches", "1"]
    job = run_ranks(2, str(script), *options, env=lean())
    number = r"\d+\.\d \+-\d+\.\d"
    told(job, rf"Total img/sec on 2 ranks: {number}")
    assert re.search(rf"^Img/sec per rank: {number}$", job.stdout, re.MULTILINE), job.stdout


@pytest.mark.parametrize("option", ["--num-iters", "--num-batches-per-iter", "--batch-size"])
def test_counts_of_the_synthetic_benchmarks_are_1_or_more(monkeypatch, capsys, option):
    monkeypatch.syspath_prepend(EXAMPLES / "synthetic")
    import measured

    parser = measured.parser("A benchmark.", "MLP", "one of a few", 8)
    assert parser.parse_args([option, "1"]).model == "MLP"
    for text, said in (("0", "0 is less than 1"), ("x", "invalid positive value: 'x'")):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([option, text])
        assert f"argument {option}: {said}" in capsys.readouterr().err


# No such backend: importing Keras fails.
WITHOUT_KERAS = lean("sklearn", KERAS_BACKEND="none")


def test_mnist_in_torch(run_ranks, tmp_path):
    options = (
        "--epochs 5 --batch_size 16 --lr 0.1 --device cpu --num_inter 1 --num_intra 1 --seed 1 "
        "--momentum 0.5 --warmup_epochs 1 --log-interval 100 --fp16-allreduce"
    ).split()
    options += ["--data", str(tmp_path / "none.npz")]
    job = run_ranks(2, str(MNIST / "train_torch.py"), *options, env=WITHOUT_KERAS)
    said = told(
        job,
        r"Trained on scikit-learn's digits with 2 ranks: [\d,]+ images/s in total, "
        r"test accuracy (\d+\.\d)%",
    )
    assert float(said[1]) > 60
    assert job.stdout.count("Epoch 5: average loss ") == 1


@pytest.mark.slow
def test_synthetic_benchmark_of_torch(run_ranks):
    script = EXAMPLES / "synthetic" / "torch_benchmark.py"
    options = "--model CNN --batch-size 8 --image-size 8 --num-iters 2 --num-batches-per-iter 2"
    options = [*options.split(), "--num-warmup-batches", "0", "--device", "gpu"]
    environment = {**WITHOUT_KERAS, "CUDA_VISIBLE_DEVICES": ""}
    job = run_ranks(2, str(script), *options, env=environment)
    assert job.stdout.count("no GPU that torch can use") == 1, job.stdout
    number = r"\d+\.\d \+-\d+\.\d"
    told(job, rf"Total img/sec on 2 ranks: {number}")
    assert re.search(rf"^Img/sec per rank: {number}$", job.stdout, re.MULTILINE), job.stdout


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_gan(run_ranks, backend):
    job = run_ranks(
        2,
        str(EXAMPLES / "gan" / "train.py"),
        *("--epochs", "2"),
        env=lean("sklearn", KERAS_BACKEND=backend),
    )
    told(
        job,
        r"Trained a GAN on .+ with 2 ranks: "
        r"judge loss (\d\.\d+), maker loss (\d\.\d+), all replicas are equal\.",
    )
    assert job.stdout.count("Epoch 2/2") == 1


@pytest.mark.slow
def test_hdf5():
    program = [sys.executable, EXAMPLES / "hdf5" / "train.py"]
    job = keras_dist("run", "-np", 2, *program, "--size", "0.004", "--batch-size", "64")
    told(job, "All ways have read the same rows.*")
    number = r" +[\d,]+ \|"
    lines = re.findall(rf"^([a-zA-Z -]+) +\|{number}{number} (\d+\.\d+)$", job.stdout, re.MULTILINE)
    assert len({way for way, _ in lines}) == 3, job.stdout
    assert len({loss for _, loss in lines}) == 1, job.stdout


@pytest.mark.slow
def test_a_model_on_several_ranks(run_ranks):
    jax = lean(KERAS_BACKEND="jax")  # which starts fastest
    products = run_ranks(3, str(EXAMPLES / "model_parallel" / "products.py"), env=jax)
    told(products, r"Weights found by 3 ranks: 1\.000 2\.000 3\.000")
    mlp = run_ranks(
        2,
        str(EXAMPLES / "model_parallel" / "mlp.py"),
        # 4 of 1024 are left, too few to split.
        *("--epochs", "2", "--batch-size", "60", "--micro-batches", "5", "--lr", "0.03"),
        env=jax,
    )
    said = told(mlp, r"Trained 1 pipeline of 2 stages: (\d+\.\d)% right\.")
    assert float(said[1]) > 90


@pytest.mark.slow
def test_imagenet_style():
    program = [sys.executable, EXAMPLES / "imagenet_style" / "train.py"]
    job = keras_dist("run", "-np", 2, *program, "--smoke")
    said = told(
        job,
        r"Trained ResNet-50 on 64 images of 4 classes with 2 ranks, loss \d+\.\d+: "
        r"reading alone ([\d,]+) images/s, with training ([\d,]+) images/s: "
        r"(computing|reading) bounds\. All replicas are equal\.",
    )
    assert all(int(number.replace(",", "")) > 0 for number in said.groups()[:2])
    assert job.stdout.count("Epoch 2/2") == 1


def test_crops_of_the_imagenet_style_tree_hold_a_part_of_the_box(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "imagenet_style")
    import tree

    tree.draw(tmp_path / "train", tmp_path / "boxes", classes=2, images=3)
    paths, classes = tree.images_in(tmp_path / "train")
    assert len(paths) == 6 and classes == ["n00000000", "n00000001"]
    for path in paths:
        top, left, bottom, right = tree.box_of(path.encode(), tmp_path / "boxes")
        assert 0 <= top < bottom <= 1 and 0 <= left < right <= 1 and bottom - top >= 0.3
    assert tree.box_of(b"train/none/0.JPEG", tmp_path / "boxes").tolist() == list(tree.WHOLE)
    assert tree.box_of(paths[0].encode(), None).tolist() == list(tree.WHOLE)
    for training in (True, False):
        read = tree.reader(classes, tmp_path / "boxes", 8, training)
        samples = list(read(paths).as_numpy_iterator())
        assert sorted(int(label) for _, label in samples) == [0, 0, 0, 1, 1, 1]
        assert all(image.shape == (8, 8, 3) and image.min() >= -1 for image, _ in samples)
        # Each class has a colour, red or green, which fills a crop around its box.
        if not training:
            assert all(
                image[..., label].mean() > image[..., 1 - label].mean() for image, label in samples
            )
