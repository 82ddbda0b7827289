"""The examples run as their README says."""

import re
import sys
from pathlib import Path

import pytest
import traces
from start_jobs import keras_dist, lean, told

EXAMPLES = Path(__file__).parents[2] / "examples"
MNIST = EXAMPLES / "mnist"


@pytest.fixture(autouse=True)
def without_network(monkeypatch, tmp_path_factory):
    """Uses scikit-learn's small data set on every machine; MNIST would take minutes."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # a port without a server
    monkeypatch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))


RIGHT = r"test accuracy (\d+\.\d)%"


def accuracy(job, pattern, epochs=2):
    """Returns the accuracy in the only line of a job that matches a pattern, in percent."""
    assert len(re.findall(rf"^[Ee]poch {epochs}(/{epochs}$|: )", job.stdout, re.MULTILINE)) == 1
    return float(told(job, pattern)[1])


# After two epochs of scikit-learn's digits; chance is 10.
@pytest.mark.short
def test_mnist(tmp_path):
    checkpoint, timeline = tmp_path / "mnist.keras", tmp_path / "t.json"
    program = [sys.executable, MNIST / "train.py", "--epochs", 2, "--checkpoint", checkpoint]
    job = keras_dist("run", "-np", 2, "--timeline", timeline, *program, env=lean("sklearn"))
    line = rf"Trained on .+ with 2 ranks: [\d,]+ images/s in total, {RIGHT}"
    assert accuracy(job, rf"{line}, all replicas are equal\.") > 25
    assert sorted(tmp_path.iterdir()) == [checkpoint, timeline]
    reduced = traces.bars(traces.load(timeline), "the reduction of gradients")
    assert {bar["pid"] for bar in reduced} == {0, 1}
    report = keras_dist("timeline", timeline)
    assert report.returncode == 0, report.stdout
    lines = re.findall(r"^ *\d on ", report.stdout, re.MULTILINE)
    assert len(lines) == 4, report.stdout  # of a step, and of the whole time, for each rank


def test_mnist_with_a_loop_by_hand(run_ranks):
    job = run_ranks(2, MNIST / "train_custom_loop.py", "--epochs", 2, env=lean("sklearn"))
    said = told(job, rf"Trained on .+ with 2 ranks: {RIGHT}, all replicas are equal\.")
    assert float(said[1]) > 25


@pytest.mark.slow
def test_mnist_with_a_tape(run_ranks, tmp_path):
    options = (
        "--epochs 2 --batch_size 32 --lr 0.002 --device cpu --num_inter 1 --num_intra 1 "
        f"--warmup_epochs 1 --fp16-allreduce --checkpoint_dir {tmp_path}"
    ).split()
    job = run_ranks(2, MNIST / "train_tape.py", *options, env=lean("sklearn"))
    assert accuracy(job, rf"Trained on .+ with 2 ranks: {RIGHT}\.") > 25
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.slow
def test_cifar10(run_ranks):
    options = "--made 1000 --epochs 3 --width 8 --batch-size 25 --warmup-epochs 1".split()
    job = run_ranks(2, EXAMPLES / "cifar10" / "train.py", *options, env=lean())
    assert accuracy(job, rf"Trained on made pictures with 2 ranks: {RIGHT}\.", epochs=3) > 25


SPEED = r"\d+\.\d \+-\d+\.\d"
# No such backend: importing Keras fails.
WITHOUT_KERAS = {"KERAS_BACKEND": "none", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "variables"),
    [
        ("tensorflow_benchmark", "--model MLP --num-warmup-batches 1", {}),
        ("torch_benchmark", "--model CNN --num-warmup-batches 0 --device gpu", WITHOUT_KERAS),
    ],
    ids=["tensorflow", "torch"],
)
def test_synthetic_benchmark(run_ranks, script, options, variables):
    small = "--batch-size 8 --image-size 8 --num-iters 2 --num-batches-per-iter 2"
    words = [EXAMPLES / "synthetic" / f"{script}.py", *options.split(), *small.split()]
    job = run_ranks(2, *words, env=lean(**variables))
    told(job, rf"Total img/sec on 2 ranks: {SPEED}")
    assert re.search(rf"^Img/sec per rank: {SPEED}$", job.stdout, re.MULTILINE), job.stdout
    without_gpu = job.stdout.count("no GPU that torch can use")
    assert without_gpu == ("gpu" in options), job.stdout


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


def test_mnist_in_torch(run_ranks, tmp_path):
    options = (
        "--epochs 5 --batch_size 16 --lr 0.1 --device cpu --num_inter 1 --num_intra 1 --seed 1 "
        "--momentum 0.5 --warmup_epochs 1 --log-interval 100 --fp16-allreduce "
        f"--data {tmp_path / 'none.npz'}"
    ).split()
    job = run_ranks(2, MNIST / "train_torch.py", *options, env=lean("sklearn", **WITHOUT_KERAS))
    line = rf"Trained on scikit-learn's digits with 2 ranks: [\d,]+ images/s in total, {RIGHT}"
    assert accuracy(job, line, epochs=5) > 60


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_gan(run_ranks, backend):
    environment = lean("sklearn", KERAS_BACKEND=backend)
    job = run_ranks(2, EXAMPLES / "gan" / "train.py", "--epochs", 2, env=environment)
    told(
        job,
        r"Trained a GAN on .+ with 2 ranks: "
        r"judge loss (\d\.\d+), maker loss (\d\.\d+), all replicas are equal\.",
    )
    assert job.stdout.count("Epoch 2/2") == 1


@pytest.mark.slow
def test_hdf5():
    program = [sys.executable, EXAMPLES / "hdf5" / "train.py"]
    options = ("--size", "0.004", "--batch-size", "64")
    job = keras_dist("run", "-np", 2, *program, *options, env=lean(KERAS_BACKEND="torch"))
    told(job, "All ways have read the same rows.*")
    number = r" +[\d,]+ \|"
    lines = re.findall(rf"^([a-zA-Z -]+) +\|{number}{number} (\d+\.\d+)$", job.stdout, re.MULTILINE)
    assert len({way for way, _ in lines}) == 3, job.stdout
    assert len({loss for _, loss in lines}) == 1, job.stdout


@pytest.mark.slow
def test_a_model_on_several_ranks(run_ranks):
    jax, torch = (lean(KERAS_BACKEND=backend) for backend in ("jax", "torch"))
    products = run_ranks(3, EXAMPLES / "model_parallel" / "products.py", env=jax)
    told(products, r"Weights found by 3 ranks: 1\.000 2\.000 3\.000")
    # 4 of 1024 are left, too few to split.
    options = "--epochs 2 --batch-size 60 --micro-batches 5 --lr 0.03".split()
    mlp = run_ranks(2, EXAMPLES / "model_parallel" / "mlp.py", *options, env=torch)
    said = told(mlp, r"Trained 1 pipeline of 2 stages: (\d+\.\d)% right\.")
    assert float(said[1]) > 90


@pytest.mark.slow
def test_imagenet_style():
    program = [sys.executable, EXAMPLES / "imagenet_style" / "train.py"]
    environment = lean("tensorflow", KERAS_BACKEND="torch")  # which traces nothing
    job = keras_dist("run", "-np", 2, *program, "--smoke", env=environment)
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
