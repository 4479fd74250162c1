"""More failures told in public issue trackers, and fixes of some of them that must stay quiet."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.programs import Case, healthy, mean_of_squares, program

Batch = dict[str, Tensor]


@program(phase="backward", mechanism="pole", op="pow")
def generalized_mean_of_a_dead_channel() -> Case:
    """leftthomas/CGD#12: PowBackward0 where a channel is zero everywhere."""

    class GlobalDescriptor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            powered = (x * self.scale).pow(3).mean((2, 3))
            return powered.pow(1 / 3)  # BAD

    x = torch.rand(2, 4, 3, 3)
    x[:, 1] = 0
    return GlobalDescriptor(), {"x": x}, lambda m, b: m(b["x"]).sum()


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def rotation_from_an_axis_of_length_zero() -> Case:
    """kornia/kornia#611: the angle of an axis of length zero."""

    class Rotation(nn.Module):
        def forward(self, axis: Tensor) -> Tensor:
            squared = (axis * axis).sum(-1, keepdim=True)
            theta = torch.sqrt(squared)  # BAD
            unit = axis / (theta + 1e-6)
            return torch.cat([torch.cos(theta), unit * torch.sin(theta)], -1)

    head = nn.Linear(4, 3)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(head, Rotation()), {"x": torch.randn(5, 4)}, mean_of_squares


@program(phase="backward", mechanism=("pole", "invalid"), op="acos")
def geodesic_distance_of_equal_rotations() -> Case:
    """papagina/RotationContinuity#1, cheind/pure-torch-ngp#4: the cosine of no rotation is 1."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        turned = batch["target"] * model(batch["x"]).view(-1, 1, 1)
        cosine = (turned.diagonal(dim1=1, dim2=2).sum(-1) - 1) / 2
        return torch.acos(cosine).mean()  # BAD

    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.ones_(model.bias)
    return model, {"x": torch.randn(3, 2), "target": torch.eye(3).repeat(3, 1, 1)}, step


@program(phase="forward", mechanism="range-overflow", op="sum")
def keys_of_linear_attention_summed_in_half_precision() -> Case:
    """idiap/fast-transformers#32: the keys are summed over the sequence, and 16 bits end at 65504."""

    class LinearAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            keys = (F.elu(self.k(x)) + 1).half()
            total = keys.sum(1)  # BAD
            return torch.einsum("bnd,bd->bn", keys, total).float()

    model = LinearAttention()
    with torch.no_grad():
        model.k.bias.fill_(400.0)
    return model, {"x": torch.randn(1, 256, 8)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="bmm", module="attend")
def unscaled_scores_of_a_pyramid() -> Case:
    """plemeri/InSPyReNet#36: queries and keys are not normalized, and their product leaves float16."""

    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            score = torch.bmm(q, k.transpose(1, 2))  # BAD
            return torch.softmax(score, -1)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.attend = nn.Linear(16, 16), nn.Linear(16, 16), Attend()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attend((self.q(x) * 300).half(), (self.k(x) * 300).half())
            return out.float()

    return Decoder(), {"x": torch.randn(2, 6, 16) * 5}, mean_of_squares


@program(phase="forward", mechanism="masked-row", op="_softmax")
def lowest_number_added_to_negative_scores() -> Case:
    """keras-team/keras#17571: the mask is the lowest number of float16, and the scores push it to −inf."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = (model(batch["x"]) - 60).half()
        mask = (1 - batch["keep"]).half() * torch.finfo(torch.float16).min
        scores = scores + mask
        return torch.softmax(scores, -1).float().square().sum()  # BAD

    keep = torch.ones(3, 4)
    keep[1] = 0
    return nn.Linear(5, 4), {"x": torch.randn(3, 5), "keep": keep}, step


@program(phase="forward", mechanism=("underflow", "pole"), op="reciprocal")
def normalizer_of_random_features_in_half_precision() -> Case:
    """facebookresearch/xformers#96: the normalization of Favor underflows in float16."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        q = torch.exp(model(batch["x"]) - 12).half()
        k = torch.exp(model(batch["y"]) - 12).half()
        weight = q @ k.sum(0)
        return (1.0 / weight).float().mean()  # BAD

    return nn.Linear(4, 8), {"x": torch.randn(6, 4), "y": torch.randn(6, 4)}, step


@program(phase="forward", mechanism="empty-reduction", op="mean")
def class_loss_where_no_anchor_is_valid() -> Case:
    """WongKinYiu/yolov9#662: the validity mask has no true entry, and what is left is averaged."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        each = F.binary_cross_entropy_with_logits(logits, batch["y"], reduction="none")
        return each[batch["valid"]].mean() + 0.1 * logits.square().mean()  # BAD

    batch = {"x": torch.randn(4, 3), "y": torch.zeros(4, 2), "valid": torch.zeros(4, dtype=torch.bool)}
    return nn.Linear(3, 2), batch, step


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def overlap_of_two_boxes_without_area() -> Case:
    """YunYang1994/tensorflow-yolov3#225: width and height of both boxes are 0."""

    def overlap(a: Tensor, b: Tensor) -> Tensor:
        low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        areas = (a[:, 2:] - a[:, :2]).prod(-1) + (b[:, 2:] - b[:, :2]).prod(-1)
        return shared / (areas - shared)  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        size = F.relu(model(batch["x"]))
        corner = batch["boxes"][:, :2]
        return (1 - overlap(torch.cat([corner, corner + size], -1), batch["boxes"])).mean()

    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias.fill_(-50)
    return model, {"x": torch.randn(2, 3), "boxes": torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 2.0, 2.0]])}, step


@program(phase="forward", mechanism="empty-reduction", op="div")
def detection_loss_of_a_background_batch() -> Case:
    """ultralytics/ultralytics#490: the sum of the target scores is 0 when no image shows an object."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["x"])
        normalizer = batch["scores"].sum()
        weight = batch["scores"].sum(-1)
        return (scores.square().mean(-1) * weight).sum() / normalizer  # BAD

    return nn.Linear(3, 4), {"x": torch.randn(5, 3), "scores": torch.zeros(5, 4)}, step


@program(phase="forward", mechanism="pole", op="log")
def height_of_a_box_without_height() -> Case:
    """matterport/Mask_RCNN#159: divide by zero encountered in log."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        delta = torch.log(batch["gt"] / batch["anchor"])  # BAD
        return F.smooth_l1_loss(model(batch["x"]), delta)

    gt = torch.tensor([[4.0, 2.0], [3.0, 0.0]])
    return nn.Linear(3, 2), {"x": torch.randn(2, 3), "gt": gt, "anchor": torch.ones(2, 2)}, step


@program(phase="forward", mechanism="invalid", op="log")
def width_of_a_box_with_swapped_corners() -> Case:
    """jwyang/faster-rcnn.pytorch#318 and its kin: x2 < x1 in the annotation."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        wide = batch["gt"][:, 1] - batch["gt"][:, 0]
        target = torch.log(wide / 16)  # BAD
        return (model(batch["x"]).squeeze(-1) - target).abs().mean()

    return nn.Linear(3, 1), {"x": torch.randn(2, 3), "gt": torch.tensor([[0.0, 4.0], [9.0, 5.0]])}, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def sampling_with_an_unbounded_log_variance() -> Case:
    """vanderschaarlab/synthcity#331: the standard deviation of the reparametrization explodes."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_variance = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            deviation = torch.exp(0.5 * self.log_variance(x))  # BAD
            return self.mean(x) + torch.randn_like(deviation) * deviation

    model = Encoder()
    with torch.no_grad():
        model.log_variance.bias[0] = 200.0
    return model, {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="_linalg_slogdet")
def covariance_of_a_process_without_noise() -> Case:
    """SUTDBrainLab/MGP-VAE#2: the covariance of a smooth process is singular in float32."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        feature = model(batch["x"])
        covariance = feature.T @ feature
        return torch.logdet(covariance)  # BAD

    model = nn.Linear(2, 3, bias=False)
    nn.init.zeros_(model.weight)
    return model, {"x": torch.randn(4, 2)}, step


@program(phase="forward", mechanism="invalid", op="div")
def group_of_equal_rewards() -> Case:
    """OpenRLHF/OpenRLHF#830 and its kin: every sample of a group earns the same reward."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        reward = batch["reward"]
        advantage = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)  # BAD
        return -(advantage * F.logsigmoid(model(batch["x"]).squeeze(-1))).mean()

    return nn.Linear(3, 1), {"x": torch.randn(2, 4, 3), "reward": torch.tensor([[1.0, 0, 1, 0], [1, 1, 1, 1]])}, step


@program(phase="backward", mechanism=("pole", "invalid"), op="linalg_eigh")
def frame_of_a_round_point_cloud() -> Case:
    """pytorch/pytorch#47599, #76531: the eigenvectors of a repeated eigenvalue."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        points = model(batch["x"])
        covariance = points.T @ points
        _, axes = torch.linalg.eigh(covariance)  # BAD
        return (axes * batch["w"]).sum()

    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    return model, {"x": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "w": torch.tensor([[0.3, -0.2], [0.5, 0.1]])}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="addmm", module="update")
def maximum_over_the_neighbors_of_an_isolated_node() -> Case:
    """pyg-team/pytorch_geometric#1129: nothing is aggregated into an isolated node."""

    class EdgeMaximum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            nodes = torch.full((3, 4), -math.inf)
            target = torch.tensor([0, 1, 0])[:, None].expand(3, 4)
            seen = nodes.scatter_reduce(0, target, self.message(x), "amax")
            out: Tensor = self.update(seen)  # BAD
            return out

    return EdgeMaximum(), {"x": torch.randn(3, 3)}, mean_of_squares


@program(phase="forward", mechanism="empty-reduction", op="var")
def instance_deviation_of_one_pixel() -> Case:
    """digantamisra98/EvoNorm#4: the feature map has shrunk to one pixel."""

    class InstanceDeviation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            variance = torch.var(x, dim=(2, 3), keepdim=True)  # BAD
            return x / (variance + 1e-5).sqrt()

    model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.Conv2d(2, 2, 3), InstanceDeviation())
    return model, {"x": torch.randn(2, 1, 7, 7)}, mean_of_squares


@program(phase="forward", mechanism="underflow", op="log")
def mixture_likelihood_far_from_every_component() -> Case:
    """keras-team/keras#1061: the sum of the densities is 0 in float32."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        mean, weight = model(batch["x"]).chunk(2, -1)
        density = torch.exp(-((batch["y"] - mean) ** 2) / 2) / math.sqrt(2 * math.pi)
        return -torch.log((torch.softmax(weight, -1) * density).sum(-1)).mean()  # BAD

    return nn.Linear(3, 8), {"x": torch.randn(2, 3), "y": torch.tensor([[0.0], [30.0]])}, step


@program(phase="forward", mechanism="pole", op="div")
def robust_loss_at_the_quadratic_case() -> Case:
    """jonbarron/robust_loss_pytorch#21: alpha = 2 without the tricks of the paper's appendix."""

    class General(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            beta = (self.alpha - 2).abs()
            inner = x.square() / beta + 1  # BAD
            return beta / self.alpha * (inner.pow(self.alpha / 2) - 1)

    return nn.Sequential(nn.Linear(3, 2), General()), {"x": torch.randn(4, 3)}, lambda m, b: m(b["x"]).mean()


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def training_rate_of_a_task_that_began_at_zero() -> Case:
    """vpetren/gradnorm_tf#17: losses relative to the first ones, one of which was 0."""

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 2)
            self.register_buffer("first", torch.tensor([1.5, 0.0]))

        def forward(self, x: Tensor) -> Tensor:
            losses = F.relu(self.body(x) - 100).square().mean(0)
            rate = losses / self.first  # BAD
            return (rate / rate.mean() * losses).sum()

    return Balanced(), {"x": torch.randn(4, 3)}, lambda m, b: m(b["x"])


@program(phase="forward", mechanism="pole", op="rsqrt")
def demodulated_convolution_of_a_style_of_zeros() -> Case:
    """lucidrains/gigagan-pytorch#56: the weights are divided by their norm, and the style is 0."""

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))
            self.style = nn.Linear(2, 3)
            nn.init.zeros_(self.style.weight)
            nn.init.zeros_(self.style.bias)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight * self.style(x)[:, None]
            norm = weight.square().sum(-1, keepdim=True).rsqrt()  # BAD
            return weight * norm

    return Modulated(), {"x": torch.randn(2, 2)}, mean_of_squares


@program(phase="forward", mechanism="empty-reduction", op="div")
def contrast_of_an_anchor_without_a_positive() -> Case:
    """HobbitLong/SupContrast#141, #50: one view per image, and a label that occurs once."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        feature = F.normalize(model(batch["x"]), dim=-1)
        label = batch["label"][:, None]
        mask = torch.eq(label, label.T).float()
        other = 1 - torch.eye(len(label))
        mask = mask * other
        logits = feature @ feature.T / 0.1
        log_prob = logits - torch.log((torch.exp(logits) * other).sum(1, keepdim=True))
        per_anchor = (mask * log_prob).sum(1) / mask.sum(1)  # BAD
        return -per_anchor.mean()

    return nn.Linear(3, 3), {"x": torch.randn(4, 3), "label": torch.tensor([0, 1, 1, 3])}, step


@program(phase="backward", mechanism=("pole", "where-gradient", "invalid"), op="sqrt")
def margin_of_a_feature_on_its_class_center() -> Case:
    """ronghuaiyang/arcface-pytorch#91, d3-ai/face-verification-demo#5: the sine is 0."""

    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.center = nn.Parameter(torch.eye(2))

        def forward(self, x: Tensor) -> Tensor:
            cosine = F.linear(F.normalize(x), F.normalize(self.center))
            sine = torch.sqrt(1.0 - cosine.square())  # BAD
            return cosine * math.cos(0.5) - sine * math.sin(0.5)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]) * 30, torch.tensor([0, 1]))

    return nn.Sequential(nn.Identity(), Margin()), {"x": torch.tensor([[2.0, 0.0], [0.5, 1.0]])}, step


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="div")
def dice_of_an_empty_label_and_an_empty_prediction() -> Case:
    """Project-MONAI/MONAI#120: label and prediction are zero."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        predicted = F.relu(model(batch["x"]))
        shared = (predicted * batch["y"]).sum(1)
        dice = 2 * shared / (predicted.sum(1) + batch["y"].sum(1))  # BAD
        return 1 - dice.mean()

    model = nn.Linear(3, 4)
    with torch.no_grad():
        model.bias.fill_(-50)
    y = torch.zeros(2, 4)
    y[0, 1] = 1
    return model, {"x": torch.randn(2, 3), "y": y}, step


@program(phase="forward", mechanism="invalid", op="div")
def harmonic_mean_of_two_zeros() -> Case:
    """Project-MONAI/MONAI#8739: precision and sensitivity of the skeletons are both 0, with smooth=0."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        predicted = torch.sigmoid(model(batch["x"]))
        precision = (predicted * batch["y"]).sum() / predicted.sum()
        recall = (batch["y"] * predicted).sum() / (batch["y"].sum() + 1)
        return 1 - 2 * (precision * recall) / (precision + recall)  # BAD

    return nn.Linear(3, 4), {"x": torch.randn(2, 3), "y": torch.zeros(2, 4)}, step


@program(phase="backward", mechanism=("pole", "invalid"), op="sqrt")
def edges_of_a_flat_image() -> Case:
    """chaddy1004/sobel-operator-pytorch#1: the gradient of an image is 0 where it is flat."""

    class Sobel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kernel = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
            self.register_buffer("kernels", torch.stack([kernel, kernel.T])[:, None])

        def forward(self, image: Tensor) -> Tensor:
            sides = F.conv2d(image, self.kernels)
            return torch.sqrt(sides.square().sum(1, keepdim=True))  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.sobel = nn.Parameter(torch.tensor(0.5)), Sobel()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.sobel(x * self.scale)
            return out

    return Net(), {"x": torch.ones(1, 1, 6, 6)}, lambda m, b: m(b["x"]).mean()


@program(phase="backward", mechanism=("pole", "invalid", "underflow"), op="angle")
def phase_of_a_very_quiet_bin() -> Case:
    """pytorch/pytorch#98276: the gradient of angle is NaN close to 0."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        spectrum = torch.complex(batch["re"] * model(batch["x"]).squeeze(-1), batch["im"])
        return torch.angle(spectrum).sum()  # BAD

    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    batch = {"x": torch.ones(2, 1), "re": torch.tensor([5.6843e-30, 1.0]), "im": torch.tensor([1e-30, 1.0])}
    return model, batch, step


@program(phase="backward", mechanism=("pole", "where-gradient", "invalid"), op="sqrt")
def intelligibility_with_the_eps_outside_the_root() -> Case:
    """mpariente/pytorch_stoi#14: eps is added after the root instead of before."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        clean = model(batch["x"])
        norm = clean.square().sum(-1, keepdim=True).sqrt() + 1e-8  # BAD
        return (clean / norm).square().sum(-1).add(1).log().mean()

    model = nn.Linear(3, 3, bias=False)
    x = torch.randn(4, 3)
    x[2] = 0
    return model, {"x": x}, step


@program(phase="forward", mechanism="invalid", op="sqrt")
def newton_step_with_a_negative_discriminant() -> Case:
    """pyro-ppl/pyro#1273: the discriminant is negative by rounding or by nature, and is not clamped."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        a, b, c = model(batch["x"]).unbind(-1)
        root = torch.sqrt(b.square() - 4 * a.square() - c.square() - 1)  # BAD
        return root.mean()

    return nn.Linear(2, 3), {"x": torch.randn(4, 2)}, step


@program(phase="leaf", mechanism="bad-leaf", leaf="parameter W")
def weights_of_a_margin_loss_that_went_bad() -> Case:
    """KevinMusgrave/pytorch-metric-learning#209: the weights of the loss are −inf after some steps in float16."""

    class MarginLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.W)  # BAD

    model = MarginLoss()
    with torch.no_grad():
        model.W[1, 2] = -math.inf
    return model, {"x": torch.randn(2, 4)}, mean_of_squares


@healthy
def norm_of_a_centroid_at_the_origin() -> Case:
    """pqhieu/jsis3d#26, pytorch/pytorch#2421: torch.norm has a subgradient at 0 by now."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return torch.norm(model(batch["x"]), 2, dim=1).mean()

    return nn.Linear(3, 2, bias=False), {"x": torch.zeros(2, 3)}, step


@healthy
def deviation_of_a_constant_feature() -> Case:
    """pytorch/pytorch#4320: torch.std of a constant has a finite gradient by now."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).std(0).mean()

    return nn.Linear(3, 2), {"x": torch.ones(4, 3)}, step


@healthy
def distance_matrix_with_its_diagonal() -> Case:
    """pytorch/pytorch#37337: cdist has a subgradient at 0 by now."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        feature = model(batch["x"])
        return torch.cdist(feature, feature).mean()

    return nn.Linear(3, 2), {"x": torch.randn(5, 3)}, step


@healthy
def fixed_margin_of_a_feature_on_its_class_center() -> Case:
    """ronghuaiyang/arcface-pytorch#91, as it was proposed: clamped above 0 before the root."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        cosine = F.linear(F.normalize(batch["x"]), F.normalize(model.weight))  # type: ignore[arg-type]
        sine = torch.sqrt((1.0 - cosine.square()).clamp(1e-6, 1))
        return F.cross_entropy((cosine * math.cos(0.5) - sine * math.sin(0.5)) * 30, torch.tensor([0, 1]))

    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    return model, {"x": torch.tensor([[2.0, 0.0], [0.5, 1.0]])}, step


@healthy
def maximum_over_neighbors_with_empty_nodes_filled() -> Case:
    """pyg-team/pytorch_geometric#1129, fixed: −inf of an isolated node becomes 0."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        nodes = torch.full((3, 4), -math.inf)
        seen = nodes.scatter_reduce(0, torch.tensor([0, 1, 0])[:, None].expand(3, 4), model(batch["x"]), "amax")
        return torch.where(torch.isinf(seen), torch.zeros(()), seen).square().mean()

    return nn.Linear(3, 4), {"x": torch.randn(3, 3)}, step


@healthy
def dice_with_a_smoothing_term() -> Case:
    """nasa/delta#115: eps in the denominator."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        predicted = F.relu(model(batch["x"]) - 100)
        return 1 - (2 * (predicted * batch["y"]).sum(1) / (predicted.sum(1) + batch["y"].sum(1) + 1e-7)).mean()

    return nn.Linear(3, 4), {"x": torch.randn(2, 3), "y": torch.zeros(2, 4)}, step
