"""Ways to break the library, as data: each is a change of one place that some test must notice.

`mutation.py` tries them all; `test_mutants.py` sees to it that they follow the source.
"""

from dataclasses import dataclass
from difflib import ndiff


@dataclass(frozen=True)
class Mutant:
    name: str  # begins with the file, or with what it is about
    file: str  # below src/paceline/optim
    old: str  # occurs exactly once in the file
    new: str
    killers: tuple[str, ...]  # tests that should fail, quickest first; what pytest takes as an argument

    def applied_to(self, text: str) -> str:
        """The text of the file with this mutant in it."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)

    def difference(self) -> str:
        return "\n".join(ndiff(self.old.splitlines(), self.new.splitlines()))


# --- Killers that many share ----------------------------------------------------------------------

_RULE = "tests/optim/test_rule.py"
_PATHS = "tests/optim/test_paths.py"
_ADAMW = "tests/optim/test_adamw.py"
_SETTINGS = "tests/optim/test_settings.py"
_SHAPES = "tests/optim/test_shapes.py"
_FAULTS = "tests/optim/test_faults.py"
_STATE = "tests/optim/test_state.py"
_LOADING = "tests/optim/test_loading.py"
_FUSED = "tests/optim/test_fused.py"
_CHECKPOINTS = "tests/optim/test_checkpoints.py"
_WEIGHTS = "tests/optim/test_weights.py"
_EXPORT = "tests/optim/test_export.py"
_PULLBACK = "tests/optim/test_pullback.py"
_AVERAGES = "tests/optim/test_averages.py"
_BASELINES = "tests/optim/test_baselines.py"
_ADEMAMIX = "tests/optim/test_ademamix.py"
_BATTERY = "tests/optim/test_battery.py"
_WRAPPERS = "tests/optim/test_wrappers.py"
_SCALED = "tests/optim/test_scaled.py"

_REFERENCE = f"{_RULE}::test_against_the_reference_over_200_steps"
_GOLDEN = "tests/optim/test_golden.py"
_RATE = f"{_RULE}::test_averaging_rate_is_the_papers"
_CONSTANT = f"{_RULE}::test_constant_weights_stay_their_own_average_to_the_bit"
_LR_0 = f"{_RULE}::test_learning_rate_0_leaves_live_and_still_averages"
_LANDS = f"{_RULE}::test_infinite_lookahead_lands_on_the_new_average"
_LOOP = f"{_PATHS}::test_foreach_is_the_loop_bit_for_bit"
_EVERY = f"{_ADAMW}::test_between_updates_a_step_is_adamws"
_SECOND = f"{_ADAMW}::test_a_returned_average_leaves_live_bit_identical"
_DEVICE = f"{_SETTINGS}::test_device_scalars_give_the_same_trajectory"
_DEVICE_AGES = f"{_SETTINGS}::test_device_scalars_of_parameters_of_different_age_and_at_rate_0"
_DIFFERENTIABLE = f"{_SETTINGS}::test_differentiable_steps_have_the_gradient_of_finite_differences"
_GRADIENTS = f"{_FAULTS}::test_gradients_are_never_modified"
_BAD = f"{_FAULTS}::test_a_bad_gradient_spoils_its_own_coordinate_and_no_other"
_FITS = "tests/optim/test_fits.py"
_SKIP = f"{_FAULTS}::test_skip_nonfinite_leaves_everything_bit_for_bit"
_PRECISION = "tests/optim/test_precision.py::test_the_average_moves_where_a_low_precision_one_stands_still"
_DTYPES = "tests/optim/test_precision.py::test_precision_of_the_state"
_BEFORE_FIRST = f"{_STATE}::test_weights_changed_before_the_first_step_count"
_RESET = f"{_STATE}::test_reset_average_starts_again_from_live"
_COPIES = f"{_STATE}::test_copies_go_on_alike_and_share_nothing"
_CAST = f"{_STATE}::test_state_follows_a_model_that_is_cast"
_CAST_SHOWN = f"{_STATE}::test_a_cast_while_shown_does_not_touch_the_average"
_MISFIT = f"{_LOADING}::test_a_state_that_does_not_fit_changes_nothing"
_FROM_ADAMW = f"{_LOADING}::test_an_adamw_checkpoint_goes_on_with_averages_from_the_loaded_weights"
_SHOWN_ORDER = f"{_CHECKPOINTS}::test_saved_while_shown_resumes_from_live_in_either_order"
_DCP_SAME = f"{_CHECKPOINTS}::test_dcp_get_and_set_change_nothing"
_DCP_LEFTOVERS = f"{_CHECKPOINTS}::test_dcp_does_not_mix_our_own_entries_into_a_checkpoint"
_SHOWN = f"{_WEIGHTS}::test_block_shows_the_returned_average_and_restores_live"
_SWAPS = f"{_WEIGHTS}::test_a_thousand_swaps_are_the_identity"
_REFUSED = f"{_WEIGHTS}::test_step_nesting_and_train_inside_a_block_are_refused"
_IDEMPOTENT = f"{_WEIGHTS}::test_eval_and_train_are_idempotent_and_free_when_nothing_changes"
_FORGOTTEN = f"{_WEIGHTS}::test_a_step_after_a_forgotten_eval_is_correct"
_INSIDE = f"{_WEIGHTS}::test_state_dict_inside_is_the_one_outside_plus_live"
_EXPORTED = f"{_EXPORT}::test_export_is_a_copy_in_the_precision_asked_for"
_TWIN = f"{_PULLBACK}::test_pullback_of_adamw_is_pace"
_MOMENTS = f"{_PULLBACK}::test_around_bases_with_a_second_moment"
_DEFINITION = f"{_AVERAGES}::test_each_average_is_its_definition"
_BEMA = f"{_AVERAGES}::test_bema_against_golden_values"

RULE = [
    Mutant(
        "rule-rate-of-the-step-before",
        "rule.py",
        "return (offset + scale * t) ** -power",
        "return (offset + scale * (t - 1)) ** -power",
        (_RATE, _REFERENCE),
    ),
    Mutant(
        "rule-rate-of-the-next-step",
        "rule.py",
        "return (offset + scale * t) ** -power",
        "return (offset + scale * (t + 1)) ** -power",
        (_RATE, _REFERENCE),
    ),
    Mutant(
        "rule-rate-without-offset",
        "rule.py",
        "return (offset + scale * t) ** -power",
        "return (1.0 + scale * t) ** -power",
        (_RATE, _REFERENCE),
    ),
    Mutant(
        "rule-rate-without-scale",
        "rule.py",
        "return (offset + scale * t) ** -power",
        "return (offset + t) ** -power",
        (_RATE, _REFERENCE),
    ),
    Mutant(
        "rule-paper-gain-without-lr",
        "rule.py",
        "    return lr * strength\n",
        "    return strength\n",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-paper-gain-without-strength",
        "rule.py",
        "    return lr * strength\n",
        "    return lr\n",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-paper-gain-infinite",
        "rule.py",
        "else min(float(numerator), limit)",
        "else numerator",
        (f"{_FAULTS}::test_an_infinite_strength_stays_finite_where_the_second_moment_overflows",),
    ),
    Mutant(
        "rule-scaled-gain-without-scale",
        "rule.py",
        "return lr * strength * scale",
        "return lr * strength",
        (_REFERENCE,),
    ),
    Mutant(
        "foreach-scaled-gain-without-scale",
        "foreach.py",
        "strength, out=out, scale=at.scale)",
        "strength, out=out)",
        (_LOOP,),
    ),
    Mutant(
        "work-scale-of-one-group",
        "work.py",
        "work.group) for work in works for parameter in work.parameters]\n",
        "work.group) for work in works[:1] for parameter in work.parameters]\n",
        (f"{_SCALED}::test_the_scale_is_that_of_all_groups_and_of_those_that_take_part",),
    ),
    Mutant(
        "moments-scale-uncorrected",
        "moments.py",
        "torch.nan_to_num(sums / squares, nan=0.0, posinf=0.0)",
        "torch.nan_to_num(sums, nan=0.0, posinf=0.0)",
        (_REFERENCE,),
    ),
    Mutant(
        "moments-scale-spoiled",
        "moments.py",
        "torch.nan_to_num(sums / squares, nan=0.0, posinf=0.0)",
        "(sums / squares)",
        (f"{_SCALED}::test_a_tensor_that_is_not_finite_spares_the_rest",),
    ),
    Mutant(
        "pullback-without-scale",
        "pullback.py",
        'scale = self._scale() if recipe.gain == "scaled" and recipe.pullback_strength != 0 else 1.0',
        "scale = 1.0",
        (f"{_SCALED}::test_pullback_of_adamw_is_the_same_to_the_bit",),
    ),
    Mutant(
        "rule-uniform-gain-by-lr",
        "rule.py",
        "return out.fill_(terms.strength)",
        "return out.fill_(terms.strength * terms.lr)",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-relative-mean-uncorrected",
        "rule.py",
        "rms = spared.mean().sqrt() / terms.root_correction",
        "rms = spared.mean().sqrt()",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-relative-clip-low",
        "rule.py",
        "torch.clamp(spread, 0.25, 4.0, out=terms.out)",
        "torch.clamp(spread, 0.2, 4.0, out=terms.out)",
        (
            "tests/optim/test_rule.py::test_the_relative_ratio_is_clipped_at_a_quarter_and_at_four",
            _REFERENCE,
            _GOLDEN,
        ),
    ),
    Mutant(
        "rule-relative-clip-high",
        "rule.py",
        "torch.clamp(spread, 0.25, 4.0, out=terms.out)",
        "torch.clamp(spread, 0.25, 5.0, out=terms.out)",
        (_REFERENCE, _GOLDEN),
    ),
    Mutant(
        "rule-relative-without-strength",
        "rule.py",
        "torch.clamp(spread, 0.25, 4.0, out=terms.out), terms.strength,",
        "torch.clamp(spread, 0.25, 4.0, out=terms.out), 1.0,",
        (_REFERENCE,),
    ),
    Mutant("rule-relative-nan-spreads", "rule.py", ".nan_to_num(nan=0.0, posinf=0.0)", "", (_BAD,)),
    Mutant(
        "rule-relative-inf-spreads",
        "rule.py",
        ".nan_to_num(nan=0.0, posinf=0.0)",
        ".nan_to_num(nan=0.0)",
        (_BAD,),
    ),
    Mutant(
        "rule-clip-missing",
        "rule.py",
        "return min(recipe.max_gain, torch.finfo(dtype).max)",
        "return torch.finfo(dtype).max",
        (f"{_RULE}::test_infinite_strength_moves_live_by_the_whole_gap", _REFERENCE),
    ),
    Mutant(
        "rule-clip-lower",
        "rule.py",
        "return min(recipe.max_gain, torch.finfo(dtype).max)",
        "return min(0.99 * recipe.max_gain, torch.finfo(dtype).max)",
        (f"{_RULE}::test_infinite_strength_moves_live_by_the_whole_gap", _REFERENCE),
    ),
    Mutant(
        "rule-clip-higher",
        "rule.py",
        "return min(recipe.max_gain, torch.finfo(dtype).max)",
        "return min(1.01 * recipe.max_gain, torch.finfo(dtype).max)",
        (f"{_RULE}::test_infinite_strength_moves_live_by_the_whole_gap", _REFERENCE),
    ),
    Mutant(
        "rule-clip-infinite",
        "rule.py",
        "return min(recipe.max_gain, torch.finfo(dtype).max)",
        "return recipe.max_gain",
        (f"{_FAULTS}::test_zero_gradients_give_no_nan_where_adamw_gives_none",),
    ),
    Mutant(
        "rule-counts-twice",
        "rule.py",
        "    step += 1\n    at = at_step(",
        "    step += 2\n    at = at_step(",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-step-of-the-next",
        "rule.py",
        "t: Scalar = step if on_device else step.item()",
        "t: Scalar = step if on_device else step.item() + 1",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-device-step-of-the-next",
        "rule.py",
        "t: Scalar = step if on_device else step.item()",
        "t: Scalar = step + 1 if on_device else step.item()",
        (_DEVICE,),
    ),
    Mutant(
        "rule-first-moment-uncorrected",
        "rule.py",
        "step_size = lr / (1 - beta1**t) * -1",
        "step_size = lr * -1.0",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-second-moment-uncorrected",
        "rule.py",
        "root_correction=(1 - beta2**t) ** 0.5,",
        "root_correction=1.0,",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-second-moment-corrected-by-the-step-before",
        "rule.py",
        "root_correction=(1 - beta2**t) ** 0.5,",
        "root_correction=(1 - beta2 ** max(t - 1, 1)) ** 0.5,",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-tensor-lr-not-differentiable",
        "rule.py",
        "and not on_device and not recipe.differentiable:",
        "and not on_device:",
        (_DIFFERENTIABLE,),
    ),
    Mutant(
        "rule-update-every-shifted",
        "rule.py",
        "else t % recipe.update_every == 0",
        "else (t - 1) % recipe.update_every == 0",
        (_EVERY,),
    ),
    Mutant(
        "rule-update-every-one-more",
        "rule.py",
        "else t % recipe.update_every == 0",
        "else t % (recipe.update_every + 1) == 0",
        (_EVERY,),
    ),
    Mutant(
        "rule-pull-at-lr-0",
        "rule.py",
        "if recipe.pullback_strength == 0 or (not isinstance(lr, Tensor) and lr == 0):",
        "if recipe.pullback_strength == 0:",
        (_LR_0,),
    ),
    Mutant(
        "rule-pull-at-tensor-lr-0",
        "rule.py",
        "else bool(averaging and lr != 0)",
        "else bool(averaging)",
        (_LR_0,),
    ),
    Mutant(
        "rule-device-pull-at-lr-0",
        "rule.py",
        "pulling = averaging & (lr != 0) if on_device",
        "pulling = averaging if on_device",
        (_DEVICE_AGES,),
    ),
    Mutant(
        "rule-control-average-at-the-returned-rate",
        "rule.py",
        "        rate=rates[0],",
        "        rate=rates[1],",
        (_SECOND,),
    ),
    Mutant(
        "rule-returned-average-at-the-control-rate",
        "rule.py",
        "return_rate=rates[1],",
        "return_rate=rates[0],",
        (_SECOND,),
    ),
    Mutant(
        "rule-device-averages-at-every-step",
        "rule.py",
        "torch.where(averaging, rate, 0.0) if isinstance(averaging, Tensor) else rate",
        "rate",
        (_DEVICE,),
    ),
    Mutant(
        "rule-decay-without-lr",
        "rule.py",
        "decay=1 - lr * recipe.weight_decay,",
        "decay=1 - recipe.weight_decay,",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-shares-do-not-sum-to-1", "rule.py", "return keep, 1 - keep", "return keep, rate", (_CONSTANT,)
    ),
    Mutant(
        "rule-shares-unrounded",
        "rule.py",
        "else torch.tensor(1 - rate, dtype=dtype).item()",
        "else 1 - rate",
        (_CONSTANT,),
    ),
    Mutant(
        "rule-average-moves-the-other-way",
        "rule.py",
        "average.mul_(keep).add_(live, alpha=move)",
        "average.mul_(move).add_(live, alpha=keep)",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-average-rounded-to-live",
        "rule.py",
        "average.mul_(keep).add_(live, alpha=move)",
        "average.copy_(average.mul_(keep).add_(live, alpha=move).to(live.dtype))",
        (_PRECISION,),
    ),
    Mutant(
        "rule-rate-1-keeps-infinities",
        "rule.py",
        "    if not isinstance(keep, Tensor) and keep == 0:",
        "    if False:",
        (f"{_WRAPPERS}::test_an_infinite_weight_is_averaged_as_what_it_is",),
    ),
    Mutant(
        "rule-seed-missing",
        "rule.py",
        "    elif t == 1:",
        "    elif t == 0:",
        (
            f"{_FAULTS}::test_a_skipped_first_step_does_not_seed",
            _BEFORE_FIRST,
        ),
    ),
    Mutant("rule-seed-twice", "rule.py", "    elif t == 1:", "    elif t <= 2:", (_REFERENCE,)),
    Mutant(
        "rule-device-seed-missing",
        "rule.py",
        "torch.where(t == 1, live, average)",
        "torch.where(t == 0, live, average)",
        (_DEVICE_AGES,),
    ),
    Mutant(
        "rule-seed-of-returned-missing",
        "rule.py",
        "        seed_average_(returned, live, at.t)",
        "        pass",
        (
            "tests/optim/test_state.py::test_averages_are_seeded_by_the_first_step_itself",
            _BEFORE_FIRST,
        ),
    ),
    Mutant(
        "rule-seed-from-raw",
        "rule.py",
        "        control_(slot, gap, denominator, at, recipe)",
        "        seed_average_(average, live, at.t)\n        control_(slot, gap, denominator, at, recipe)",
        (_REFERENCE,),
    ),
    Mutant("rule-gap-sign", "rule.py", "else average - live", "else live - average", (_REFERENCE,)),
    Mutant(
        "rule-gap-after-the-step",
        "rule.py",
        "            pull_(live, gap, gain)",
        "            pull_(live, average - live, gain)",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-gap-after-decay",
        "rule.py",
        "        live.mul_(at.decay)",
        "        live.mul_(at.decay)\n        gap = None if gap is None else average - live",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-decay-coupled",
        "rule.py",
        "        live.mul_(at.decay)",
        "        grad = grad + recipe.weight_decay * live",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-average-before-the-pull",
        "rule.py",
        '    lookahead = recipe.gap == "lookahead"',
        "    lookahead = True",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-lookahead-to-the-old-average",
        "rule.py",
        '    lookahead = recipe.gap == "lookahead"',
        "    lookahead = False",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-lookahead-the-other-way",
        "rule.py",
        "torch.lerp(start, _kept(average, recipe), gain)",
        "torch.lerp(_kept(average, recipe), start, gain)",
        (_LANDS,),
    ),
    Mutant(
        "rule-eps-inside-the-root",
        "rule.py",
        "denominator = exp_avg_sq.sqrt() / at.root_correction + recipe.eps",
        "denominator = (exp_avg_sq + recipe.eps).sqrt() / at.root_correction",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-eps-bias-corrected",
        "rule.py",
        "denominator = exp_avg_sq.sqrt() / at.root_correction + recipe.eps",
        "denominator = (exp_avg_sq.sqrt() + recipe.eps) / at.root_correction",
        (_REFERENCE,),
    ),
    Mutant("rule-maximize-ignored", "rule.py", "        grad = -grad", "        pass", (_REFERENCE,)),
    Mutant(
        "rule-maximize-in-place",
        "rule.py",
        "        grad = -grad",
        "        grad = grad.neg_()",
        (_GRADIENTS,),
    ),
    Mutant(
        "rule-first-moment-the-other-way",
        "rule.py",
        "exp_avg.lerp_(grad, 1 - beta1)",
        "exp_avg.lerp_(grad, beta1)",
        (_REFERENCE,),
    ),
    Mutant("rule-second-moment-by-beta1", "rule.py", "value=1 - beta2)", "value=1 - beta1)", (_REFERENCE,)),
    Mutant(
        "rule-returned-follows-the-average",
        "rule.py",
        "move_average_(slot.returned, live, at.return_rate)",
        "move_average_(slot.returned, average, at.return_rate)",
        (_GOLDEN,),
    ),
    Mutant(
        "rule-gain-without-rate",
        "rule.py",
        "strength, correction = float(recipe.pullback_strength) * at.rate,",
        "strength, correction = float(recipe.pullback_strength),",
        (_REFERENCE,),
    ),
    Mutant(
        "rule-gain-at-the-returned-rate",
        "rule.py",
        "strength, correction = float(recipe.pullback_strength) * at.rate,",
        "strength, correction = float(recipe.pullback_strength) * at.return_rate,",
        (_SECOND,),
    ),
    Mutant(
        "rule-device-pull-not-switched-off",
        "rule.py",
        "return torch.where(at.pulling, gain, 0.0) if isinstance(at.pulling, Tensor) else gain",
        "return gain",
        (_DEVICE_AGES,),
    ),
    Mutant(
        "rule-differentiable-overwrites",
        "rule.py",
        "return tensor.clone() if recipe.differentiable else tensor",
        "return tensor",
        (_DIFFERENTIABLE,),
    ),
]

FOREACH = [
    Mutant(
        "foreach-gap-sign",
        "foreach.py",
        "torch._foreach_sub(averages, lives)",
        "torch._foreach_sub(lives, averages)",
        (_LOOP,),
    ),
    Mutant(
        "foreach-count-missing",
        "foreach.py",
        "torch._foreach_add_([slot.step for slot in slots], 1)",
        "torch._foreach_add_([slot.step for slot in slots[:1]], 1)",
        (_LOOP,),
    ),
    Mutant(
        "foreach-count-by-chunk",
        "foreach.py",
        "on_device_of(chunk[0].live, scale))\n",
        "on_device_of(chunk[0].live, scale))\n        torch._foreach_add_([s.step for s in slots], 1)\n",
        (f"{_PATHS}::test_chunks_do_not_change_a_bit", _LOOP),
    ),
    Mutant(
        "foreach-groups-mix-steps",
        "foreach.py",
        "(slot.live, None if on_device else slot.step.item())",
        "(slot.live, None)",
        (_LOOP,),
    ),
    Mutant(
        "foreach-groups-mix-precisions",
        "foreach.py",
        "(tensor.device, tensor.dtype, mesh_of(tensor), rest)",
        "(tensor.device, mesh_of(tensor), rest)",
        (f"{_PATHS}::test_mixed_precisions_in_one_group_are_as_if_alone",),
    ),
    Mutant(
        "foreach-full-chunk-lost",
        "foreach.py",
        "                yield chunk\n                chunk, size = [], 0",
        "                chunk, size = [], 0",
        (f"{_PATHS}::test_chunks_do_not_change_a_bit",),
    ),
    Mutant(
        "foreach-chunks-unbounded",
        "foreach.py",
        "if chunk and size + elements > CHUNK_ELEMENTS:",
        "if chunk and size + elements < 0:",
        (f"{_PATHS}::test_temporary_memory_is_bounded_by_the_chunk",),
    ),
    Mutant(
        "foreach-seed-missing",
        "foreach.py",
        "    _seed_averages_(chunk, ats)\n",
        "",
        (
            "tests/optim/test_state.py::test_averages_are_seeded_by_the_first_step_itself",
            _BEFORE_FIRST,
        ),
    ),
    Mutant(
        "foreach-seed-of-returned-missing",
        "foreach.py",
        "            seed_average_(slot.returned, slot.live, at.t)",
        "            pass",
        (
            "tests/optim/test_state.py::test_averages_are_seeded_by_the_first_step_itself",
            _BEFORE_FIRST,
        ),
    ),
    Mutant(
        "foreach-maximize-ignored", "foreach.py", "grads = list(torch._foreach_neg(grads))", "pass", (_LOOP,)
    ),
    Mutant(
        "foreach-maximize-in-place",
        "foreach.py",
        "grads = list(torch._foreach_neg(grads))",
        "torch._foreach_neg_(grads)",
        (_GRADIENTS,),
    ),
    Mutant(
        "foreach-gap-after-decay",
        "foreach.py",
        "        torch._foreach_mul_(lives, at.decay)",
        "        torch._foreach_mul_(lives, at.decay)\n        gaps = gaps_of(averages, lives, ats, recipe)",
        (_LOOP,),
    ),
    Mutant(
        "foreach-decay-coupled",
        "foreach.py",
        "        torch._foreach_mul_(lives, at.decay)",
        "        grads = list(torch._foreach_add(grads, lives, alpha=recipe.weight_decay))",
        (_LOOP,),
    ),
    Mutant(
        "foreach-second-moment-by-beta1",
        "foreach.py",
        "torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)",
        "torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta1)",
        (_LOOP,),
    ),
    Mutant(
        "foreach-device-step-size-of-the-first",
        "foreach.py",
        '_each(ats, "step_size")',
        "[at.step_size] * len(ats)",
        (_DEVICE_AGES,),
    ),
    Mutant(
        "foreach-device-root-of-the-first",
        "foreach.py",
        'torch._foreach_div_(denominators, _each(ats, "root_correction"))',
        "torch._foreach_div_(denominators, [ats[0].root_correction] * len(ats))",
        (_DEVICE_AGES,),
    ),
    Mutant(
        "foreach-updates-at-every-step",
        "foreach.py",
        "    if at.averaging is not False:",
        "    if True:",
        (_EVERY,),
    ),
    Mutant(
        "foreach-second-moment-uncorrected",
        "foreach.py",
        '    torch._foreach_div_(denominators, _each(ats, "root_correction"))\n',
        "",
        (_LOOP,),
    ),
    Mutant(
        "foreach-eps-bias-corrected",
        "foreach.py",
        '    torch._foreach_div_(denominators, _each(ats, "root_correction"))\n'
        "    torch._foreach_add_(denominators, eps)\n",
        "    torch._foreach_add_(denominators, eps)\n"
        '    torch._foreach_div_(denominators, _each(ats, "root_correction"))\n',
        (_LOOP,),
    ),
    Mutant(
        "foreach-average-before-the-pull",
        "foreach.py",
        '    lookahead = recipe.gap == "lookahead"',
        "    lookahead = bool(gaps) or recipe.gap == 'lookahead'",
        (_LOOP,),
    ),
    Mutant(
        "foreach-average-of-raw",
        "foreach.py",
        "        gains = _gains_(denominators, exp_avg_sqs, averages, ats, recipe)\n",
        "        gains = _gains_(denominators, exp_avg_sqs, averages, ats, recipe)\n"
        "        if not lookahead:\n"
        '            move_averages_(averages, lives, _each(ats, "rate"))\n'
        "            averages = [average.clone() for average in averages]\n",
        (_LOOP,),
    ),
    Mutant(
        "foreach-returned-at-the-control-rate",
        "foreach.py",
        '_each(ats, "return_rate")',
        '_each(ats, "rate")',
        (_LOOP,),
    ),
    Mutant(
        "foreach-gradients-kept",
        "foreach.py",
        "    del grads\n",
        "",
        (f"{_PATHS}::test_temporary_memory_of_a_foreach_step",),
    ),
    Mutant(
        "foreach-gain-not-in-place",
        "foreach.py",
        "        gains = denominators\n        torch._foreach_reciprocal_(gains)\n",
        "        gains = list(torch._foreach_reciprocal(denominators))\n",
        (f"{_PATHS}::test_temporary_memory_of_a_foreach_step",),
    ),
    Mutant(
        "foreach-gain-without-rate",
        "foreach.py",
        "        strength = float(recipe.pullback_strength) * at.rate\n",
        "        strength = float(recipe.pullback_strength)\n",
        (_LOOP,),
    ),
    Mutant(
        "foreach-clip-missing",
        "foreach.py",
        "    torch._foreach_clamp_max_(gains, gain_limit(recipe, gains[0].dtype))\n",
        "",
        (_LOOP,),
    ),
    Mutant(
        "foreach-device-pull-not-switched-off",
        "foreach.py",
        "    if isinstance(ats[0].pulling, Tensor):",
        "    if False:",
        (_DEVICE_AGES,),
    ),
    Mutant(
        "foreach-lookahead-the-other-way",
        "foreach.py",
        "torch._foreach_lerp_(wide, averages, gains)",
        "wide = list(torch._foreach_lerp(averages, wide, gains))",
        (_LANDS,),
    ),
    Mutant(
        "foreach-average-moves-the-other-way",
        "foreach.py",
        "        keep, move = shares(rates[0], averages[0].dtype)",
        "        move, keep = shares(rates[0], averages[0].dtype)",
        (_LOOP,),
    ),
    Mutant(
        "foreach-rate-1-keeps-infinities",
        "foreach.py",
        "        if keep == 0:",
        "        if False:",
        (f"{_WRAPPERS}::test_an_infinite_weight_is_averaged_as_what_it_is",),
    ),
    Mutant(
        "foreach-device-average-moves-the-other-way",
        "foreach.py",
        "        keeps, moves = (list(column)",
        "        moves, keeps = (list(column)",
        (_DEVICE,),
    ),
]

STATE = [
    Mutant(
        "state-step-in-float32",
        "state.py",
        '"step": torch.zeros((), dtype=torch.float64,',
        '"step": torch.zeros((), dtype=torch.float32,',
        (_DTYPES,),
    ),
    Mutant(
        "state-step-not-made-float64",
        "state.py",
        '    _convert(state, "step", step_device(live, group), torch.float64)\n',
        "",
        (
            "tests/optim/test_state.py::test_a_step_count_carried_over_by_hand_counts_on",
            f"{_LOADING}::test_a_load_in_inference_mode_and_a_state_carried_from_adamw",
        ),
    ),
    Mutant(
        "state-average-in-low-precision",
        "state.py",
        "return _WIDER.get(live.dtype, live.dtype)",
        "return live.dtype",
        (_DTYPES, _PRECISION),
    ),
    Mutant(
        "state-average-is-live",
        "state.py",
        '"average": live.to(average_dtype(live), copy=True),',
        '"average": live.to(average_dtype(live)),',
        (_REFERENCE,),
    ),
    Mutant(
        "state-returned-is-the-average",
        "state.py",
        'state["returned"] = state["average"].clone()\n    return state',
        'state["returned"] = state["average"]\n    return state',
        (_SECOND,),
    ),
    Mutant(
        "state-later-returned-is-the-average",
        "state.py",
        '    elif "returned" not in state:\n        state["returned"] = state["average"].clone()',
        '    elif "returned" not in state:\n        state["returned"] = state["average"]',
        (f"{_LOADING}::test_a_return_power_set_or_unset_in_mid_run",),
    ),
    Mutant(
        "state-unset-returned-stays",
        "state.py",
        '    if "returned" not in wanted:\n        state.pop("returned", None)',
        '    if "returned" not in wanted:\n        pass',
        (f"{_LOADING}::test_a_return_power_set_or_unset_in_mid_run",),
    ),
    Mutant(
        "state-control-average-shown",
        "state.py",
        'return "returned" if "returned" in state else "average"',
        'return "average"',
        (_SHOWN,),
    ),
    Mutant(
        "state-moments-not-cast",
        "state.py",
        "        _convert(state, key, live.device, live.dtype)",
        "        pass",
        (_CAST,),
    ),
    Mutant(
        "state-averages-not-cast",
        "state.py",
        "        _convert(state, key, live.device, average_dtype(live))",
        "        pass",
        (_CAST,),
    ),
    Mutant(
        "state-reset-average-counts-as-seeded",
        "state.py",
        'return "unseeded" not in state and state["step"].item() > 0',
        'return state["step"].item() > 0',
        (_RESET, f"{_BATTERY}::test_a_reset_average_is_live_again"),
    ),
    Mutant(
        "state-fresh-average-counts-as-seeded",
        "state.py",
        'return "unseeded" not in state and state["step"].item() > 0',
        'return "unseeded" not in state',
        (_BEFORE_FIRST,),
    ),
    Mutant(
        "state-misfit-replaced-in-mid-run",
        "state.py",
        'if state["step"].is_meta or state["step"].item() != 0:',
        'if state["step"].is_meta:',
        (f"{_SHAPES}::test_a_wrong_shape_is_refused_with_both_shapes",),
    ),
    Mutant(
        "state-misfit-not-replaced",
        "state.py",
        'if _is_misfit(live, state, "exp_avg", name):',
        "if False:",
        (f"{_STATE}::test_parameters_of_a_shape_known_later",),
    ),
    Mutant(
        "state-late-wrapper-counts-from-0",
        "state.py",
        'taken = base.get("step", 0)',
        "taken = 0",
        (f"{_PULLBACK}::test_a_base_in_use_is_wrapped_with_its_state",),
    ),
    Mutant(
        "state-late-wrapper-not-seeded",
        "state.py",
        'return state if taken == 0 else {**state, "unseeded": torch.tensor(True)}',
        "return state",
        (
            "tests/optim/test_pullback.py::test_weights_loaded_between_wrapping_and_the_next_step_count",
            f"{_PULLBACK}::test_a_base_in_use_is_wrapped_with_its_state",
        ),
    ),
    Mutant(
        "work-missing-gradient-is-0",
        "work.py",
        "    members = [(i, parameter)",
        "    for parameter in group['params']:\n"
        "        if parameter.grad is None and parameter.requires_grad:\n"
        "            parameter.grad = torch.zeros_like(parameter)\n"
        "    members = [(i, parameter)",
        (f"{_SHAPES}::test_a_parameter_without_gradient_is_skipped_whole",),
    ),
    Mutant(
        "work-huge-gradients-are-bad",
        "work.py",
        "whole((grad * 0).sum())",
        "whole(grad.sum() * 0)",
        (f"{_FAULTS}::test_skip_nonfinite_does_not_take_huge_gradients_for_bad",),
    ),
    Mutant(
        "work-fit-whatever-strides",
        "work.py",
        "        or parameter.stride() != fit.stride\n        or grad.stride() != fit.stride\n",
        "",
        (_FITS,),
    ),
    Mutant(
        "work-fit-whatever-gradient-strides",
        "work.py",
        "        or grad.stride() != fit.stride\n",
        "",
        (_FITS,),
    ),
    Mutant(
        "work-fit-whatever-addresses",
        "work.py",
        "    if _addresses(parameter, kept) != fit.addresses:\n        return None\n",
        "",
        (_FITS,),
    ),
    Mutant(
        "work-fit-whatever-settings",
        "work.py",
        " or fit.settings != settings:",
        ":",
        (_FITS,),
    ),
    Mutant(
        "work-fit-whatever-layout",
        "work.py",
        "        or grad.layout != torch.strided\n",
        "",
        (_FITS,),
    ),
    Mutant(
        "work-only-first-gradient-checked",
        "work.py",
        "torch.float32) for grad in grads]",
        "torch.float32) for grad in grads[:1]]",
        (_SKIP,),
    ),
]

PACE = [
    Mutant(
        "pace-group-settings-unchecked",
        "pace.py",
        "            recipe.check(settings)\n",
        "",
        (f"{_SETTINGS}::test_a_groups_own_settings_are_checked_too",),
    ),
    Mutant(
        "pace-group-takes-what-suits-the-first",
        "pace.py",
        "            settings = recipe.completed(recipe.with_gain({**self.defaults, **param_group}))",
        "            settings = {**recipe.completed(recipe.with_gain(self.defaults)), **param_group}",
        (f"{_SETTINGS}::test_a_group_with_a_gain_of_its_own_gets_what_suits_that",),
    ),
    Mutant(
        "recipe-same-average-twice",
        "recipe.py",
        '    if full["return_power"] == full["ema_power"]:\n        full["return_power"] = None\n',
        "",
        (f"{_SETTINGS}::test_what_is_not_said_suits_the_gain",),
    ),
    Mutant(
        "recipe-what-suits-overrides",
        "recipe.py",
        "        if full[name] is None:\n            full[name] = value",
        "        full[name] = value",
        (f"{_SETTINGS}::test_what_is_not_said_suits_the_gain",),
    ),
    Mutant(
        "recipe-strength-0-keeps-two-averages",
        "recipe.py",
        "    if _pulls_nothing(group):\n        powers",
        "    if False:\n        powers",
        (f"{_SETTINGS}::test_what_is_not_said_suits_the_gain",),
    ),
    Mutant(
        "recipe-a-strength-without-its-gain",
        "recipe.py",
        "    if strength is not None and not _pulls_nothing(group):\n",
        "    if False:\n",
        (f"{_SETTINGS}::test_out_of_range_settings_are_refused_with_name_value_and_range",),
    ),
    Mutant(
        "loading-a-state-gets-an-average-nobody-asked-for",
        "loading.py",
        '    return said.get("return_power") is not None or power',
        "    return True or power",
        (f"{_LOADING}::test_a_state_of_one_average_stays_so_unless_another_is_asked_for",),
    ),
    Mutant(
        "kernel-averages-what-was-not-stored",
        "kernel.py",
        "    live = live.to(OF).to(tl.float32)\n",
        "",
        (f"{_FUSED}::test_low_precision_is_rounded_once",),
    ),
    Mutant(
        "kernel-pulls-from-the-raw-step",
        "kernel.py",
        "(live if LOOKAHEAD else before)",
        "live",
        (f"{_FUSED}::test_against_the_reference",),
    ),
    Mutant(
        "kernel-without-scale",
        "kernel.py",
        "numerator * tl.load(scale)",
        "numerator",
        (f"{_FUSED}::test_against_the_reference",),
    ),
    Mutant(
        "kernel-writes-beyond-the-end",
        "kernel.py",
        "        tl.store(start + offsets, value.to(OF), mask=offsets < count - first)",
        "        tl.store(start + offsets, value.to(OF), mask=offsets <= count - first)",
        (f"{_FUSED}::test_nothing_outside_a_tensor_is_touched",),
    ),
    Mutant(
        "fused-one-age-for-all",
        "fused.py",
        "slot.step.item(), _is_aligned(slot))",
        "_is_aligned(slot))",
        (f"{_FUSED}::test_what_is_not_alike_is_as_if_alone",),
    ),
    Mutant(
        "onepass-the-moment-for-the-gradient",
        "onepass.py",
        "    return live.data_ptr(), grad.data_ptr(), *moments",
        "    return live.data_ptr(), exp_avg.data_ptr(), *moments",
        (f"{_FUSED}::test_against_the_reference",),
    ),
    Mutant(
        "onepass-averages-not-seeded",
        "onepass.py",
        "    if at.t == 1:\n",
        "    if False:\n",
        (f"{_FUSED}::test_what_averages_held_before_the_first_step_makes_no_difference",),
    ),
    Mutant(
        "pace-added-group-holds-live",
        "pace.py",
        '        group["parameters_hold"] = self.param_groups[0]["parameters_hold"]\n',
        "",
        (_STATE, _WEIGHTS, _CHECKPOINTS),
    ),
    Mutant(
        "pace-expanded-group-stays",
        "pace.py",
        "                self.param_groups.pop()\n",
        "",
        (f"{_SHAPES}::test_expanded_tensors_are_refused",),
    ),
    Mutant(
        "pace-frozen-parameters-get-state",
        "pace.py",
        "            if parameter.requires_grad and not is_lazy(parameter):\n",
        "            if not is_lazy(parameter):\n",
        (f"{_SHAPES}::test_frozen_parameters_have_no_state_until_thawed",),
    ),
    Mutant(
        "pace-state-made-at-the-first-step",
        "pace.py",
        "            if parameter.requires_grad and not is_lazy(parameter):\n",
        "            if False:\n",
        (_DTYPES,),
    ),
    Mutant(
        "pace-copy-lacks-entries",
        "pace.py",
        'names = ("_loaded_live", "_loaded_name", "_buffer_memory")',
        'names = ("_loaded_name", "_buffer_memory")',
        (_COPIES,),
    ),
    Mutant(
        "pace-copy-forgets-loaded-live",
        "pace.py",
        "return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}",
        'return {**super().__getstate__(), **{n: getattr(self, n) for n in names}, "_loaded_live": {}}',
        (
            "tests/optim/test_state.py::test_a_copy_right_after_loading_knows_the_live_weights_that_came_along",
            _COPIES,
            _CHECKPOINTS,
        ),
    ),
    Mutant(
        "pace-step-in-a-block",
        "pace.py",
        "        self.make_ready_to_step()\n",
        "        self._put_live_back()\n",
        (_REFUSED,),
    ),
    Mutant(
        "pace-closure-without-gradients",
        "pace.py",
        "            with torch.enable_grad():\n                loss = closure()",
        "            with torch.no_grad():\n                loss = closure()",
        (f"{_SETTINGS}::test_closure_is_evaluated_once_at_live_with_gradients",),
    ),
    Mutant(
        "pace-closure-twice",
        "pace.py",
        "                loss = closure()",
        "                closure()\n                loss = closure()",
        (f"{_SETTINGS}::test_closure_is_evaluated_once_at_live_with_gradients",),
    ),
    Mutant(
        "pace-steps-on-the-average-of-a-closure",
        "pace.py",
        "            self._put_live_back()  # a closure that evaluates may end in eval()\n",
        "",
        (f"{_SETTINGS}::test_a_closure_that_ends_in_eval_still_steps_live",),
    ),
    Mutant(
        "pace-nonfinite-never-skipped",
        "pace.py",
        "        if not all_finite([slot.grad",
        "        if False and not all_finite([slot.grad",
        (_SKIP,),
    ),
    Mutant(
        "pace-nonfinite-always-skipped",
        "pace.py",
        ' if w.group["skip_nonfinite"] for slot',
        " for slot",
        (_BAD,),
    ),
    Mutant(
        "pace-reset-not-seeded", "pace.py", "            self._seed_again(parameters, group)\n", "", (_RESET,)
    ),
    Mutant(
        "pace-seeds-before-a-skipped-step",
        "pace.py",
        "        if not all_finite([slot.grad",
        "        [self._seed_again(*w[1::-1]) for w in work]\n        if not all_finite([slot.grad",
        (
            "tests/optim/test_faults.py::test_a_skipped_step_after_a_reset_does_not_seed",
            _FAULTS,
        ),
    ),
    Mutant(
        "pace-parameter-without-saved-state-gets-none",
        "pace.py",
        "return allocate(parameter, group) if parameter.requires_grad and not is_lazy(parameter) else None",
        "return None",
        (_LOADING, _STATE),
    ),
]

AVERAGING = [
    Mutant(
        "averaging-average-of-a-fresh-state-exported",
        "averaging.py",
        "            if is_seeded(state):\n                yield tensor,",
        "            if True:\n                yield tensor,",
        (_EXPORT, f"{_BATTERY}::test_until_the_first_step_the_average_is_live"),
    ),
    Mutant(
        "averaging-parameter-listed-twice-shown-twice",
        "averaging.py",
        "yield from dict.fromkeys(parameter for group",
        "yield from list(parameter for group",
        (f"{_SETTINGS}::test_a_parameter_listed_twice_moves_as_in_adamw",),
    ),
    Mutant(
        "averaging-eval-not-idempotent",
        "averaging.py",
        "        if not self.shows_average():\n            self._show_all(self._returned_name)",
        "        self._show_all(self._returned_name)",
        (_IDEMPOTENT,),
    ),
    Mutant(
        "averaging-eval-misses-a-stale-load",
        "averaging.py",
        "        self._notice_stale_load()\n        if not self.shows_average():",
        "        self._loaded_live = {}\n        if not self.shows_average():",
        (_SHOWN_ORDER,),
    ),
    Mutant(
        "averaging-loaded-in-inference-mode",
        "averaging.py",
        "    @torch.inference_mode(False)\n    @torch.no_grad()\n    def _adopt(",
        "    @torch.no_grad()\n    def _adopt(",
        (f"{_LOADING}::test_a_load_in_inference_mode_and_a_state_carried_from_adamw",),
    ),
    Mutant(
        "averaging-failed-swap-stays",
        "averaging.py",
        "        except BaseException:\n            self._put_live_back()\n            raise",
        "        except BaseException:\n            raise",
        (f"{_WEIGHTS}::test_a_failing_swap_leaves_live_and_average_as_they_were",),
    ),
    Mutant(
        "averaging-train-in-a-block",
        "averaging.py",
        "        if self.shows_average() and self._in_block():",
        "        if False:",
        (_REFUSED,),
    ),
    Mutant(
        "averaging-views-block-nothing",
        "averaging.py",
        "for keeper in (self, *self._views))",
        "for keeper in (self,))",
        (f"{_AVERAGES}::test_views_stand_for_one_average_each",),
    ),
    Mutant(
        "averaging-shown-behind-a-wrapper",
        "averaging.py",
        "if self._outer is not None and self._outer.shows_average():",
        "if False:",
        (f"{_WRAPPERS}::test_one_average_at_a_time",),
    ),
    Mutant(
        "averaging-shown-over-the-average-underneath",
        "averaging.py",
        "            self._inner.train()  # what is set aside must be live\n",
        "            pass\n",
        (f"{_WRAPPERS}::test_one_average_at_a_time",),
    ),
    Mutant(
        "averaging-step-leaves-the-average-underneath",
        "averaging.py",
        "            self._inner.train()\n\n    def _seed_again",
        "            pass\n\n    def _seed_again",
        (f"{_WRAPPERS}::test_averages_begin_with_live_also_if_the_inner_average_was_shown",),
    ),
    Mutant(
        "averaging-save-misses-a-stale-load-underneath",
        "averaging.py",
        "            self._inner._notice_stale_load()\n",
        "            pass\n",
        (
            "tests/optim/test_wrappers.py::test_a_state_saved_right_after_the_inner_average_was_loaded_last",
            _WRAPPERS,
        ),
    ),
    Mutant(
        "averaging-saved-average-underneath-changes-later",
        "averaging.py",
        "        _settle(optimizer._inner, state_dict)\n",
        "        pass\n",
        (f"{_WRAPPERS}::test_a_state_saved_while_the_inner_average_is_shown_is_whole",),
    ),
    Mutant(
        "averaging-export-misses-a-stale-load",
        "averaging.py",
        "        self._notice_stale_load()\n        for tensor, state in self._remembered():",
        "        for tensor, state in self._remembered():",
        (f"{_WRAPPERS}::test_an_export_right_after_loading_in_the_other_order",),
    ),
    Mutant(
        "averaging-restored-in-order",
        "averaging.py",
        "in reversed(list(self._remembered())):",
        "in list(self._remembered()):",
        (f"{_WEIGHTS}::test_parameters_that_share_a_storage_are_restored",),
    ),
    Mutant(
        "averaging-not-marked-live",
        "averaging.py",
        '                self._hide(tensor, state)\n        self._mark("live")',
        "                self._hide(tensor, state)",
        (f"{_WEIGHTS}::test_a_failing_swap_leaves_live_and_average_as_they_were",),
    ),
    Mutant(
        "averaging-stale-load-never",
        "averaging.py",
        "if same_values(held, average.to(parameter)) and not same_values(held, live.to(parameter)):",
        "if False:",
        (_SHOWN_ORDER,),
    ),
    Mutant(
        "averaging-stale-load-always",
        "averaging.py",
        "if same_values(held, average.to(parameter)) and not same_values(held, live.to(parameter)):",
        "if not same_values(held, live.to(parameter)):",
        (f"{_CHECKPOINTS}::test_saved_while_shown_and_other_weights_loaded_after_it_count",),
    ),
    Mutant(
        "averaging-stale-load-not-marked",
        "averaging.py",
        "            self._mark(self._loaded_name)\n",
        "            pass\n",
        (_SHOWN_ORDER,),
    ),
    Mutant(
        "averaging-first-group-marked",
        "averaging.py",
        "        for group in self.param_groups:\n            group[self.format.hold] = held",
        "        for group in self.param_groups[:1]:\n            group[self.format.hold] = held",
        (_WEIGHTS, _CHECKPOINTS, _STATE),
    ),
    Mutant(
        "averaging-step-in-a-block",
        "averaging.py",
        "        if self._in_block():\n            raise RuntimeError(",
        "        if False:\n            raise RuntimeError(",
        (_REFUSED,),
    ),
    Mutant(
        "averaging-step-misses-a-stale-load",
        "averaging.py",
        "        if self._notice_stale_load():\n            warnings.warn(",
        "        if not self._notice_stale_load and True:\n            warnings.warn(",
        (_SHOWN_ORDER,),
    ),
    Mutant(
        "averaging-step-after-a-forgotten-eval",
        "averaging.py",
        "        self._refuse_behind_outer()\n        self._put_live_back()\n",
        "        self._refuse_behind_outer()\n",
        (f"{_BATTERY}::test_a_forgotten_eval_costs_nothing",),
    ),
    Mutant(
        "averaging-seeded-again-and-again",
        "averaging.py",
        '                del state["unseeded"]',
        "                pass",
        (_RESET, _FROM_ADAMW),
    ),
    Mutant(
        "averaging-save-misses-a-stale-load",
        "averaging.py",
        "        self._notice_stale_load()\n        if self._inner is not None:",
        "        if self._inner is not None:",
        (_SHOWN_ORDER,),
    ),
    Mutant(
        "averaging-saved-average-not-live-before-the-first-step",
        "averaging.py",
        "            self._refresh_unseeded()\n",
        "",
        (_BEFORE_FIRST,),
    ),
    Mutant(
        "averaging-notes-not-said",
        "averaging.py",
        "        for note in notes:\n",
        "        for note in notes[:0]:\n",
        (_FROM_ADAMW,),
    ),
    Mutant(
        "averaging-refused-load-ends-in-live",
        "averaging.py",
        "            if showed:\n                self._show_all(held)\n            raise",
        "            raise",
        (f"{_PULLBACK}::test_a_base_that_refuses_a_state_leaves_the_average_shown",),
    ),
    Mutant(
        "averaging-loaded-mark-kept",
        "averaging.py",
        '        self._mark("live")\n        adopted',
        "        adopted",
        (
            "tests/optim/test_battery.py::test_a_state_saved_while_the_average_is_shown_goes_on_from_live",
            f"{_WEIGHTS}::test_saved_inside_a_block_training_goes_on_from_live",
            _SHOWN_ORDER,
        ),
    ),
    Mutant(
        "averaging-saved-live-not-restored",
        "averaging.py",
        'parameter.copy_(sharded_like(saved.own["live"], parameter))',
        "pass",
        (f"{_WEIGHTS}::test_saved_inside_a_block_training_goes_on_from_live",),
    ),
    Mutant(
        "averaging-loaded-live-is-an-alias",
        "averaging.py",
        "self._loaded_live[parameter] = parameter.detach().clone()",
        "self._loaded_live[parameter] = parameter.detach()",
        (_SHOWN_ORDER,),
    ),
    Mutant(
        "averaging-load-ends-eval",
        "averaging.py",
        "        if showed:\n            self._loaded_live.clear()\n            self._show_all(held)",
        "        if False:\n            self._show_all(held)",
        (_DCP_SAME,),
    ),
    Mutant(
        "averaging-reset-in-a-block",
        "averaging.py",
        "    weights.keeper_of(optimizer).train()\n",
        "",
        (_RESET, _REFUSED),
    ),
    Mutant(
        "averaging-saved-inside-changes-later",
        "averaging.py",
        "copies = {k: entries[k].clone() for k in moving if k in entries}",
        "copies = {}",
        (_INSIDE,),
    ),
    Mutant(
        "averaging-saved-inside-lacks-unseeded-live",
        "averaging.py",
        "entries = {moving[0]: parameter.detach(), **entries}",
        "entries = {**entries}",
        ("tests/optim/test_state.py::test_all_groups_say_what_the_parameters_hold", _WEIGHTS, _CHECKPOINTS),
    ),
]

LOADING = [
    Mutant(
        "loading-casts-to-the-parameter",
        "loading.py",
        "key: value.detach().to(live.device, copy=True) if isinstance(value, Tensor) else value",
        "key: value.detach().to(live, copy=True) if isinstance(value, Tensor) else value",
        (f"{_LOADING}::test_loading_keeps_the_precision_of_the_average",),
    ),
    Mutant(
        "loading-shares-tensors",
        "loading.py",
        "key: value.detach().to(live.device, copy=True) if isinstance(value, Tensor) else value",
        "key: value.detach().to(live.device) if isinstance(value, Tensor) else value",
        (f"{_LOADING}::test_two_optimizers_never_share_a_tensor_after_loading",),
    ),
    Mutant(
        "loading-shares-the-count",
        "loading.py",
        "count.to(device, torch.float64, copy=True)",
        "count.to(device, torch.float64)",
        (f"{_LOADING}::test_two_optimizers_never_share_a_tensor_after_loading",),
    ),
    Mutant(
        "loading-count-in-its-own-precision",
        "loading.py",
        "count.to(device, torch.float64, copy=True)",
        "count.to(device, copy=True)",
        (
            "tests/optim/test_loading.py::test_right_after_a_load_the_state_is_complete",
            _FROM_ADAMW,
        ),
    ),
    Mutant(
        "loading-live-stays-in-the-state",
        "loading.py",
        'and key not in ("step", "live", *_ADAMW_ONLY_STATE)',
        'and key not in ("step", *_ADAMW_ONLY_STATE)',
        (f"{_WEIGHTS}::test_saved_inside_a_block_training_goes_on_from_live",),
    ),
    Mutant(
        "loading-amsgrad-maximum-stays",
        "loading.py",
        'and key not in ("step", "live", *_ADAMW_ONLY_STATE)',
        'and key not in ("step", "live")',
        (f"{_LOADING}::test_other_adams_are_named_in_a_warning",),
    ),
    Mutant(
        "loading-returned-from-the-control-average",
        "loading.py",
        'if "returned" in wanted and "returned" not in state and "average" in state:',
        'if "returned" in wanted and "average" in state:',
        (_SHOWN_ORDER,),
    ),
    Mutant(
        "loading-missing-returned-from-live",
        "loading.py",
        'if "returned" in wanted and "returned" not in state and "average" in state:',
        "if False:",
        (f"{_LOADING}::test_a_missing_returned_average_starts_from_the_control_average",),
    ),
    Mutant(
        "loading-missing-average-from-weights-of-now",
        "loading.py",
        '        state["unseeded"] = torch.tensor(True)\n',
        "",
        (_FROM_ADAMW,),
    ),
    Mutant(
        "loading-missing-average-not-noted",
        "loading.py",
        "                        without.setdefault(average, []).append(name)",
        "                        pass",
        (_FROM_ADAMW,),
    ),
    Mutant(
        "loading-missing-average-of-a-fresh-state-noted",
        "loading.py",
        '(not entry.own or entry.own["step"] > 0)',
        "True",
        (_LOADING, _CHECKPOINTS),
    ),
    Mutant(
        "loading-missing-average-of-a-frozen-parameter-noted",
        "loading.py",
        "if parameter.requires_grad and (not entry.own",
        "if (not entry.own",
        (f"{_WRAPPERS}::test_a_frozen_parameter_beside_a_base_with_state_from_the_start",),
    ),
    Mutant(
        "loading-two-notes-for-one-loss",
        "loading.py",
        '    if "average" in without:\n',
        "    if False:\n",
        (_FROM_ADAMW, _LOADING),
    ),
    Mutant(
        "loading-low-precision-step-accepted",
        "loading.py",
        "and step >= 256:",
        "and step > 256:",
        (f"{_LOADING}::test_a_low_precision_step_count_is_refused",),
    ),
    Mutant(
        "loading-shapes-unchecked",
        "loading.py",
        "if key in saved and saved[key].shape != live.shape:",
        "if False:",
        (_MISFIT,),
    ),
    Mutant(
        "loading-shape-of-live-unchecked",
        "loading.py",
        '{*format.required, *wanted, "average", "returned", "live"} - {"step"}',
        '{*format.required, *wanted, "average", "returned"} - {"step"}',
        (_MISFIT, _LOADING, _CHECKPOINTS),
    ),
    Mutant(
        "loading-another-kind-accepted",
        "loading.py",
        "    if missing:\n",
        "    if False:\n",
        (f"{_LOADING}::test_a_state_of_another_kind_of_optimizer_is_refused",),
    ),
    Mutant("loading-settings-unchecked", "loading.py", "        format.check(settings)\n", "", (_MISFIT,)),
    Mutant(
        "loading-settings-of-adamw-kept",
        "loading.py",
        "{k: v for k, v in saved.items() if k not in format.ignored}",
        "dict(saved)",
        (_FROM_ADAMW,),
    ),
    Mutant(
        "loading-asked-return-power-lost",
        "loading.py",
        '            settings["return_power"] = own["return_power"]',
        "            pass",
        (f"{_LOADING}::test_a_missing_returned_average_starts_from_the_control_average",),
    ),
    Mutant(
        "loading-too-many-groups-accepted",
        "loading.py",
        '    groups += state_dict["param_groups"][len(groups) :]\n',
        "",
        (_MISFIT,),
    ),
    Mutant(
        "loading-hold-flag-ignored",
        "loading.py",
        '    if saved.get(format.hold) == "live":\n',
        "    if False:\n",
        (_DCP_LEFTOVERS,),
    ),
    Mutant(
        "loading-shown-state-without-live-accepted",
        "loading.py",
        'if saved.get(format.hold, "live") != "live" and entries["step"] > 0:',
        "if False:",
        (f"{_CHECKPOINTS}::test_dcp_of_a_shown_average_resumes_from_live_or_refuses",),
    ),
    Mutant(
        "loading-plain-state-over-a-shown-average",
        "loading.py",
        '    if "live" in memory:\n',
        "    if False:\n",
        (f"{_CHECKPOINTS}::test_a_plain_state_is_not_loaded_while_the_average_is_shown",),
    ),
    Mutant(
        "loading-leftover-returned-taken",
        "loading.py",
        '        never.add("returned")',
        "        pass",
        (_DCP_LEFTOVERS,),
    ),
    Mutant(
        "loading-empty-leftovers-taken",
        "loading.py",
        " and not (isinstance(v, dict) and not v)}",
        "}",
        (
            "tests/optim/test_checkpoints.py::test_a_flat_dcp_state_loaded_right_after_a_reset_brings_its_average",
            _DCP_LEFTOVERS,
        ),
    ),
    Mutant(
        "loading-average-no-longer-kept-stays",
        "loading.py",
        'ours = (*wanted, *format.scalars, "unseeded") if format.prefix else own',
        "ours = own",
        (f"{_WRAPPERS}::test_averages_that_are_no_longer_kept",),
    ),
    Mutant(
        "loading-amsgrad-not-noted",
        "loading.py",
        '    if saved.get("amsgrad"):\n',
        "    if False:\n",
        (f"{_LOADING}::test_other_adams_are_named_in_a_warning",),
    ),
]

WEIGHTS = [
    Mutant(
        "weights-live-not-restored-after-an-exception",
        "weights.py",
        "    try:\n        yield\n    finally:\n        _in_block",
        "    if True:\n        yield\n    if True:\n        _in_block",
        (f"{_WEIGHTS}::test_an_exception_in_the_block_restores_live",),
    ),
    Mutant(
        "weights-blocks-nest", "weights.py", "    if in_block(optimizer):\n", "    if False:\n", (_REFUSED,)
    ),
    Mutant("weights-block-not-known", "weights.py", "    _in_block.add(optimizer)\n", "", (_REFUSED,)),
    Mutant("weights-block-never-left", "weights.py", "        _in_block.discard(optimizer)\n", "", (_SWAPS,)),
    Mutant(
        "weights-block-ends-eval",
        "weights.py",
        "        if not was_shown:\n",
        "        if True:\n",
        (_IDEMPOTENT,),
    ),
    Mutant(
        "weights-live-lost-where-exchanged",
        "weights.py",
        '        state[key], state["live"] = parameter.detach(), average\n',
        '        state["live"] = average\n',
        (_SHOWN,),
    ),
    Mutant(
        "weights-live-is-an-alias",
        "weights.py",
        '        state["live"] = parameter.detach().clone()\n',
        '        state["live"] = parameter.detach()\n',
        (_SHOWN,),
    ),
    Mutant(
        "weights-average-left-as-the-parameter",
        "weights.py",
        "        state[key] = live\n",
        "",
        (_SHOWN, _FORGOTTEN),
    ),
    Mutant(
        "weights-cast-while-shown-lost",
        "weights.py",
        "        parameter.copy_(shown)  # onto itself, unless a cast gave the parameter another storage\n",
        "",
        (_CAST_SHOWN,),
    ),
    Mutant(
        "weights-computed-live-is-an-alias",
        "weights.py",
        '    state["live"] = tensor.detach().clone()\n',
        '    state["live"] = tensor.detach()\n',
        (f"{_BATTERY}::test_an_exception_in_the_block_restores_live",),
    ),
    Mutant(
        "weights-computed-live-stays-in-the-state",
        "weights.py",
        '    del state["live"]  # only now: whatever interrupts the copy, it is still there\n',
        "",
        (f"{_BATTERY}::test_an_exception_in_the_block_restores_live",),
    ),
    Mutant(
        "weights-exchange-by-an-alias",
        "weights.py",
        "    kept = a.detach().clone()\n",
        "    kept = a.detach()\n",
        (_SHOWN,),
    ),
    Mutant(
        "weights-exchange-by-arithmetic",
        "weights.py",
        "        a.copy_(b)\n        b.copy_(kept)\n",
        "        a.sub_(b)\n        b.add_(a)\n        a.sub_(b).neg_()\n",
        (_SHOWN,),
    ),
    Mutant(
        "weights-interrupted-exchange-loses-one",
        "weights.py",
        "        if same_values(b, kept):\n            b.copy_(a)\n",
        "",
        (f"{_WEIGHTS}::test_an_interrupted_exchange_changes_neither",),
    ),
    Mutant(
        "weights-interrupted-exchange-not-undone",
        "weights.py",
        "            b.copy_(a)\n        a.copy_(kept)\n        raise",
        "            b.copy_(a)\n        raise",
        (f"{_WEIGHTS}::test_an_interrupted_exchange_changes_neither",),
    ),
    Mutant(
        "weights-export-is-no-copy",
        "weights.py",
        "copies[id(value)] = value.to(_target(value, dtype), copy=True)",
        "copies[id(value)] = value.to(_target(value, dtype))",
        (_EXPORTED,),
    ),
    Mutant(
        "weights-export-unties",
        "weights.py",
        "            if id(value) not in copies:\n",
        "            if True:\n",
        (_EXPORTED,),
    ),
    Mutant("weights-export-of-live", "weights.py", "averages.get(v, v).detach()", "v.detach()", (_EXPORTED,)),
    Mutant(
        "weights-export-casts-counters",
        "weights.py",
        "return dtype if dtype is not None and value.is_floating_point() else value.dtype",
        "return dtype if dtype is not None else value.dtype",
        (_EXPORTED,),
    ),
    Mutant(
        "weights-export-of-another-model",
        "weights.py",
        "    if averages and not trained:\n",
        "    if False:\n",
        (f"{_EXPORT}::test_export_of_a_model_the_optimizer_does_not_train_is_refused",),
    ),
    Mutant(
        "weights-save-not-atomic",
        "weights.py",
        'partial = path.with_name(f".{path.name}.{os.getpid()}.partial")',
        "partial = path",
        (
            f"{_EXPORT}::test_a_failed_save_leaves_the_old_file",
            f"{_EXPORT}::test_a_save_replaces_the_file_whole",
        ),
    ),
]

WRAPPER = [
    Mutant(
        "wrapper-base-steps-twice",
        "wrapper.py",
        "            self.base.step()\n",
        "            self.base.step()\n            self.base.step()\n",
        (_TWIN,),
    ),
    Mutant(
        "wrapper-base-steps-before-the-gap",
        "wrapper.py",
        "            for group, parameters in zip(self.param_groups, members, strict=True):\n"
        "                prepared.append(self._prepare(group, parameters))\n"
        "            if closure is not None:\n"
        "                loss = self.base.step(closure)\n"
        "            else:\n"
        "                self._step_base(loss)\n",
        "            self._step_base(loss)\n"
        "            for group, parameters in zip(self.param_groups, members, strict=True):\n"
        "                prepared.append(self._prepare(group, parameters))\n",
        (_TWIN,),
    ),
    Mutant(
        "wrapper-closure-twice",
        "wrapper.py",
        "                loss = closure()\n",
        "                closure()\n                loss = closure()\n",
        (f"{_BATTERY}::test_a_closure_is_evaluated_once_with_gradients_enabled",),
    ),
    Mutant(
        "wrapper-closure-handed-on",
        "wrapper.py",
        "            closure = None\n",
        "",
        (f"{_BATTERY}::test_a_closure_is_evaluated_once_with_gradients_enabled",),
    ),
    Mutant(
        "wrapper-closure-without-gradients",
        "wrapper.py",
        "            with torch.enable_grad():\n",
        "            with torch.no_grad():\n",
        (f"{_BATTERY}::test_a_closure_is_evaluated_once_with_gradients_enabled",),
    ),
    Mutant(
        "wrapper-closure-not-handed-on",
        "wrapper.py",
        "                loss = self.base.step(closure)\n",
        "                loss = closure()\n",
        (f"{_PULLBACK}::test_a_base_that_needs_a_closure_gets_it",),
    ),
    Mutant(
        "wrapper-steps-on-the-average-of-a-closure",
        "wrapper.py",
        "            self._put_live_back()  # a closure that evaluates may end in eval()\n",
        "",
        (
            "tests/optim/test_battery.py::test_a_closure_may_end_in_eval",
            f"{_BATTERY}::test_a_closure_is_evaluated_once_with_gradients_enabled",
            _PULLBACK,
        ),
    ),
    Mutant(
        "wrapper-step-in-a-block",
        "wrapper.py",
        "        self.make_ready_to_step()\n",
        "        self._put_live_back()\n",
        (f"{_BATTERY}::test_the_average_is_shown_and_taken_back",),
    ),
    Mutant(
        "wrapper-group-added-behind-lacks-settings",
        "wrapper.py",
        "if any(hold not in group for group in groups):",
        "if all(hold not in group for group in groups):",
        (f"{_WRAPPERS}::test_what_is_done_to_the_base_behind_the_back",),
    ),
    Mutant(
        "wrapper-hold-lost-behind-the-back",
        "wrapper.py",
        "                known = [self._returned_name]\n",
        "                pass\n",
        (f"{_WRAPPERS}::test_what_is_done_to_the_base_behind_the_back",),
    ),
    Mutant(
        "wrapper-settings-of-groups-lost",
        "wrapper.py",
        "            group.setdefault(name, value)",
        "            group[name] = value",
        (f"{_PULLBACK}::test_the_groups_are_the_bases_own",),
    ),
    Mutant(
        "wrapper-group-settings-unchecked",
        "wrapper.py",
        "        self.format.check({**self._settings, **param_group})\n",
        "",
        (
            "tests/optim/test_pullback.py::test_the_groups_are_the_bases_own",
            f"{_BATTERY}::test_wrong_inputs_are_refused_in_the_users_words",
        ),
    ),
    Mutant(
        "wrapper-memory-without-base-state",
        "wrapper.py",
        "        if base and parameter.requires_grad:\n",
        "        base = base or {}\n        if parameter.requires_grad:\n",
        (f"{_PULLBACK}::test_a_distributed_checkpoint_of_a_run_is_whole",),
    ),
    Mutant(
        "wrapper-abandon-missing",
        "wrapper.py",
        "                self._abandon(group, parameters)\n",
        "                pass\n",
        (f"{_BATTERY}::test_a_failing_step_of_the_base_leaves_live_as_it_was",),
    ),
    Mutant(
        "wrapper-parameters-without-gradient-advance",
        "wrapper.py",
        "[p for p in parameters if closure is None or p.grad is not None]",
        "parameters",
        (_PULLBACK, f"{_BATTERY}::test_parameters_without_gradient_are_skipped_whole"),
    ),
    Mutant(
        "wrapper-cleared-gradients-do-not-count",
        "wrapper.py",
        "[p for p in parameters if closure is None or p.grad is not None]",
        "[p for p in parameters if p.grad is not None]",
        (f"{_WRAPPERS}::test_a_base_that_clears_its_gradients",),
    ),
    Mutant(
        "wrapper-parameters-without-gradient-remembered",
        "wrapper.py",
        "if not (parameter.requires_grad if closure else parameter.grad is not None):",
        "if not parameter.requires_grad:",
        (f"{_BATTERY}::test_parameters_without_gradient_are_skipped_whole", _PULLBACK),
    ),
    Mutant(
        "wrapper-reset-not-seeded",
        "wrapper.py",
        "        self._seed_again(parameters, group)\n",
        "",
        (
            f"{_PULLBACK}::test_a_base_in_use_is_wrapped_with_its_state",
            f"{_BATTERY}::test_a_reset_average_is_live_again",
        ),
    ),
    Mutant(
        "wrapper-memory-not-conformed",
        "wrapper.py",
        "            conform_averages(parameter, state, self._counter(group), wanted,",
        "            (parameter, state, self._counter(group), wanted,",
        (f"{_PULLBACK}::test_casting_and_moving_the_model_takes_the_averages_along",),
    ),
    Mutant(
        "wrapper-base-state-is-an-alias",
        "wrapper.py",
        "{k: _copy(v) for k, v in entries.base.items()}",
        "dict(entries.base)",
        (f"{_BATTERY}::test_a_loaded_optimizer_shares_no_tensor_with_the_saved",),
    ),
    Mutant(
        "wrapper-base-state-not-loaded",
        "wrapper.py",
        "                if entries.base:\n",
        "                if False:\n",
        (f"{_PULLBACK}::test_loading_keeps_a_float32_average_beside_bfloat16_weights",),
    ),
    Mutant(
        "wrapper-base-state-alone-gives-no-memory",
        "wrapper.py",
        "            return self._remember_beside_base(parameter, group)\n",
        "            return None\n",
        (f"{_PULLBACK}::test_pullback_goes_on_from_an_adamw_checkpoint_as_pace_does",),
    ),
    Mutant(
        "wrapper-copy-lacks-entries",
        "wrapper.py",
        '"_settings", "_needs_closure")',
        '"_needs_closure")',
        (
            "tests/optim/test_wrappers.py::test_a_copy_gives_its_settings_to_new_groups",
            f"{_BATTERY}::test_copies_go_on_alike_and_share_nothing",
        ),
    ),
    Mutant(
        "wrapper-copy-lacks-loaded-live",
        "wrapper.py",
        'shared = ("_loaded_live", "_loaded_name", "_buffer_memory")',
        'shared = ("_loaded_name", "_buffer_memory")',
        (f"{_BATTERY}::test_copies_go_on_alike_and_share_nothing",),
    ),
    Mutant(
        "wrapper-copy-lacks-the-inner",
        "wrapper.py",
        '("defaults", "base", "_inner", "_own",',
        '("defaults", "base", "_own",',
        (f"{_WRAPPERS}::test_one_average_at_a_time",),
    ),
    Mutant(
        "wrapper-pull-toward-a-second-average-accepted",
        "wrapper.py",
        "    if isinstance(base, Averaging):\n        raise ValueError(",
        "    if False:\n        raise ValueError(",
        (f"{_BATTERY}::test_wrong_inputs_are_refused_in_the_users_words",),
    ),
    Mutant(
        "wrapper-wrapped-twice",
        "wrapper.py",
        "    if format.hold in group:\n",
        "    if False:\n",
        (f"{_WRAPPERS}::test_a_base_is_wrapped_once",),
    ),
    Mutant(
        "wrapper-dummy-step-counts",
        "wrapper.py",
        "        if closure is None and self._is_dummy(members):\n",
        "        if False:\n",
        (
            f"{_WRAPPERS}::test_weights_may_be_loaded_after_a_distributed_checkpoint_looked_at_a_fresh_optimizer",
        ),
    ),
    Mutant(
        "wrapper-first-step-at-rate-0-is-a-dummy",
        "wrapper.py",
        "return not any(rates) and not any(g is not None and _has_values(g) for g in gradients)",
        "return not any(rates)",
        (
            "tests/optim/test_wrappers.py::test_a_first_step_at_rate_0_counts_if_it_has_gradients",
            _WRAPPERS,
            f"{_PULLBACK}::test_a_bfloat16_run_moves_its_average_late",
            _PULLBACK,
        ),
    ),
]

PULLBACK = [
    Mutant(
        "pullback-gap-after-the-step",
        "pullback.py",
        "gaps=[chunk.gaps[i] for i in moved] if chunk.gaps else [],",
        "gaps=[real(s['average']) - real(chunk.parameters[i].detach()) for i, s in zip(moved, states)]\n"
        "        if chunk.gaps\n"
        "        else [],",
        (_TWIN,),
    ),
    Mutant(
        "pullback-gap-of-another",
        "pullback.py",
        "gaps=[chunk.gaps[i] for i in moved] if chunk.gaps else [],",
        "gaps=chunk.gaps[::-1] if chunk.gaps else [],",
        (_TWIN,),
    ),
    Mutant(
        "pullback-step-not-counted",
        "pullback.py",
        '    torch._foreach_add_([state["step"] for state in states], 1)\n',
        "",
        (_TWIN,),
    ),
    Mutant(
        "pullback-counts-updates",
        "pullback.py",
        '    torch._foreach_add_([state["step"] for state in states], 1)\n'
        "    if ats[0].averaging is False:\n        return\n",
        "    if ats[0].averaging is False:\n        return\n"
        '    torch._foreach_add_([state["step"] for state in states], 1)\n',
        (f"{_TWIN}[every_3-dtype0-False]",),
    ),
    Mutant(
        "pullback-updates-at-every-step",
        "pullback.py",
        "    if ats[0].averaging is False:\n        return\n",
        "",
        (f"{_TWIN}[every_3-dtype0-False]",),
    ),
    Mutant(
        "pullback-step-before",
        "pullback.py",
        'ats = [at_step(state["step"] + 1, recipe, there)',
        'ats = [at_step(state["step"].clamp(min=1), recipe, there)',
        (_TWIN,),
    ),
    Mutant(
        "pullback-settings-of-the-step-before",
        "pullback.py",
        'else states[0]["step"].item() + 1)',
        'else states[0]["step"].item())',
        (f"{_BASELINES}::test_ema_nesterov_switches_off_and_follows_the_rate", _BASELINES),
    ),
    Mutant(
        "pullback-groups-mix-steps",
        "pullback.py",
        'return parameter, None if on_device else memory[parameter]["step"].item()',
        "return parameter, None",
        (_TWIN,),
    ),
    Mutant(
        "pullback-seed-missing",
        "pullback.py",
        "                seed_average_(real(state[average]), live, at.t)",
        "                pass",
        (f"{_BATTERY}::test_until_the_first_step_the_average_is_live", _PULLBACK),
    ),
    Mutant(
        "pullback-gain-never-paper",
        "pullback.py",
        'group["gain"] = "uniform" if None in moments.values() else "paper"',
        'group["gain"] = "uniform"',
        (f"{_PULLBACK}::test_the_gain_is_chosen_by_what_the_base_keeps",),
    ),
    Mutant(
        "pullback-gain-decided-by-the-first",
        "pullback.py",
        'group["gain"] = "uniform" if None in moments.values() else "paper"',
        'group["gain"] = "uniform" if next(iter(moments.values())) is None else "paper"',
        (_PULLBACK,),
    ),
    Mutant(
        "pullback-gain-not-resolved",
        "pullback.py",
        '        if group["gain"] is None and moved:\n',
        "        if False:\n",
        (f"{_PULLBACK}::test_the_gain_is_chosen_by_what_the_base_keeps",),
    ),
    Mutant(
        "pullback-gain-decided-without-a-gradient",
        "pullback.py",
        '        if group["gain"] is None and moved:\n',
        '        if group["gain"] is None:\n',
        (_PULLBACK,),
    ),
    Mutant(
        "pullback-bias-correction-ignored",
        "pullback.py",
        "ats = [at._replace(root_correction=m.root_correction) for at",
        "ats = [at for at",
        (_TWIN,),
    ),
    Mutant(
        "pullback-eps-ignored",
        "pullback.py",
        "denominators_of(values, ats, known[0].eps)",
        "denominators_of(values, ats, 0.0)",
        (f"{_TWIN}[betas_eps-dtype0-False]",),
    ),
    Mutant("pullback-lr-ignored", "pullback.py", 'lr=group.get("lr", 1.0),', "lr=1.0,", (_TWIN,)),
    Mutant(
        "pullback-returned-stands-still",
        "pullback.py",
        'returned=[real(state["returned"]) for state in states if "returned" in state],',
        "returned=[],",
        (f"{_TWIN}[return_power-dtype0-False]",),
    ),
    Mutant(
        "pullback-unsized-gain-accepted",
        "pullback.py",
        "    if len(known) < len(moments):\n",
        "    if False:\n",
        (f"{_PULLBACK}::test_a_gain_that_the_base_cannot_size_is_refused",),
    ),
    Mutant(
        "moments-corrected-by-beta1",
        "moments.py",
        'step, beta2 = state["step"], group["betas"][1]',
        'step, beta2 = state["step"], group["betas"][0]',
        (_TWIN,),
    ),
    Mutant(
        "moments-amsgrad-ignored",
        "moments.py",
        'for key in ("max_exp_avg_sq", "exp_avg_sq"):',
        'for key in ("exp_avg_sq",):',
        (f"{_MOMENTS}[AMSGrad-paper]",),
    ),
    Mutant(
        "moments-adagrad-ignored",
        "moments.py",
        'for key in ("square_avg", "sum"):',
        'for key in ("square_avg",):',
        (f"{_MOMENTS}[Adagrad-paper]",),
    ),
    Mutant(
        "moments-centre-ignored",
        "moments.py",
        'if isinstance(state.get("grad_avg"), Tensor):',
        "if False:",
        (f"{_WRAPPERS}::test_a_centered_second_moment",),
    ),
    Mutant(
        "moments-adafactor-mean-over-columns",
        "moments.py",
        "rows.mean(dim=-2, keepdim=True)",
        "rows.mean(dim=-1, keepdim=True)",
        (f"{_MOMENTS}[Adafactor-paper]",),
    ),
    Mutant(
        "moments-adafactor-eps",
        "moments.py",
        "torch.finfo(value.dtype).eps if floor is None else floor)",
        "0.001 if floor is None else floor)",
        (f"{_MOMENTS}[Adafactor-paper]",),
    ),
]

AVERAGES = [
    Mutant(
        "averages-polynomial-sum-one-short",
        "averages.py",
        "for s in range(start + 1, t + 1):",
        "for s in range(start + 1, max(t, 2)):",
        (f"{_DEFINITION}[t^3]",),
    ),
    Mutant(
        "averages-polynomial-sum-of-another-run",
        "averages.py",
        "max((s for s in known if s <= t), default=0)",
        "max(known, default=0)",
        (
            f"{_WRAPPERS}::test_polynomial_averages_of_parameters_of_two_ages",
            _DEFINITION,
        ),
    ),
    Mutant(
        "averages-fixed-decay-starts-early",
        "averages.py",
        "return 1.0 if t <= self.start else 1 - self.decay",
        "return 1.0 if t < self.start else 1 - self.decay",
        (f"{_DEFINITION}[fixed from 20]",),
    ),
    Mutant(
        "averages-half-life-to-base-e",
        "averages.py",
        "-math.expm1(-math.log(2) / (self.fraction * t))",
        "-math.expm1(-1 / (self.fraction * t))",
        (f"{_DEFINITION}[half-life]",),
    ),
    Mutant(
        "averages-bema-bias-missing",
        "averages.py",
        'torch._foreach_add_(parts["average"], drifts, alpha=correction)',
        'torch._foreach_add_(parts["average"], drifts, alpha=0.0)',
        (_BEMA,),
    ),
    Mutant(
        "averages-bema-bias-sign",
        "averages.py",
        'torch._foreach_add_(parts["average"], drifts, alpha=correction)',
        'torch._foreach_add_(parts["average"], drifts, alpha=-correction)',
        (_BEMA,),
    ),
    Mutant(
        "averages-bema-bias-from-the-average",
        "averages.py",
        'drifts = torch._foreach_neg(parts["start"])',
        'drifts = torch._foreach_neg(parts["ema"])',
        (_BEMA,),
    ),
    Mutant(
        "averages-bema-every-step",
        "averages.py",
        "        if t % self.every:\n",
        "        if False:\n",
        (_BEMA,),
    ),
    Mutant(
        "averages-bema-without-floor",
        "averages.py",
        "rate = max(float(averaging_rate(t, self.power, self.offset, self.scale)), self.min_rate)",
        "rate = float(averaging_rate(t, self.power, self.offset, self.scale))",
        (f"{_AVERAGES}::test_bema_has_the_published_defaults_and_a_floor",),
    ),
    Mutant(
        "averages-blend-the-other-way",
        "averages.py",
        "return torch.lerp(live.to(average.dtype), average, self.share)",
        "return torch.lerp(average, live.to(average.dtype), self.share)",
        (f"{_DEFINITION}[blend]",),
    ),
    Mutant(
        "averages-seed-missing",
        "averages.py",
        '    if state["step"] == 0:\n',
        "    if False:\n",
        (f"{_BATTERY}::test_until_the_first_step_the_average_is_live",),
    ),
    Mutant(
        "averages-step-before",
        "averages.py",
        't = int(states[0]["step"].item())',
        't = max(int(states[0]["step"].item()) - 1, 1)',
        (_DEFINITION,),
    ),
    Mutant(
        "averages-groups-mix-steps",
        "averages.py",
        'lambda item: (item[0], item[1]["step"].item())',
        "lambda item: (item[0], None)",
        (f"{_WRAPPERS}::test_polynomial_averages_of_parameters_of_two_ages",),
    ),
    Mutant(
        "averages-buffers-by-group",
        "averages.py",
        "        if moved and self._buffers_are_due:",
        "        if moved:",
        (
            "tests/optim/test_averages.py::test_buffers_move_once_a_step_whatever_the_groups",
            _AVERAGES,
            _WRAPPERS,
        ),
    ),
    Mutant(
        "averages-masks-averaged",
        "averages.py",
        "finite = bool(buffer.isfinite().all())",
        "finite = True",
        (f"{_WRAPPERS}::test_masks_among_the_buffers_are_left_alone",),
    ),
    Mutant(
        "averages-buffers-without-a-step",
        "averages.py",
        "        if moved and self._buffers_are_due:",
        "        if self._buffers_are_due:",
        (
            "tests/optim/test_averages.py::test_buffers_move_once_a_step_whatever_the_groups",
            _AVERAGES,
            _WRAPPERS,
        ),
    ),
    Mutant(
        "averages-view-over-another",
        "averages.py",
        "        if self.owner.shows_average():\n",
        "        if False:\n",
        (f"{_AVERAGES}::test_views_stand_for_one_average_each",),
    ),
    Mutant(
        "averages-view-shows-the-first",
        "averages.py",
        "return self.owner._averages_named(self.name)",
        "return self.owner.returned_averages()",
        (f"{_AVERAGES}::test_views_stand_for_one_average_each",),
    ),
]

BASELINES = [
    Mutant(
        "gpa-live-before-the-average-moves",
        "baselines/gpa.py",
        '            move_average_(state["average"], state["fast"], 1 - group["mu_x"])\n'
        "            self._place_live(parameter, state, group)\n",
        "            self._place_live(parameter, state, group)\n"
        '            move_average_(state["average"], state["fast"], 1 - group["mu_x"])\n',
        (f"{_BASELINES}::test_gpa_is_the_papers",),
    ),
    Mutant(
        "gpa-live-the-other-way",
        "baselines/gpa.py",
        'torch.lerp(state["fast"], state["average"], group["mu_y"])',
        'torch.lerp(state["average"], state["fast"], group["mu_y"])',
        (f"{_BASELINES}::test_gpa_is_the_papers",),
    ),
    Mutant(
        "gpa-base-moves-live",
        "baselines/gpa.py",
        '            parameter.copy_(state["fast"])\n',
        "            pass\n",
        (f"{_BASELINES}::test_gpa_is_the_papers",),
    ),
    Mutant(
        "gpa-average-seeded-at-every-step",
        "baselines/gpa.py",
        '            if state["step"] == 0:\n',
        "            if True:\n",
        (f"{_BASELINES}::test_gpa_is_the_papers",),
    ),
    Mutant(
        "nesterov-starts-early",
        "baselines/ema_nesterov.py",
        'on = group["start"] < t and',
        'on = group["start"] <= t and',
        (f"{_BASELINES}::test_ema_nesterov_switches_off_and_follows_the_rate",),
    ),
    Mutant(
        "nesterov-stops-early",
        "baselines/ema_nesterov.py",
        't <= group["stop"])',
        't < group["stop"])',
        (f"{_BASELINES}::test_ema_nesterov_switches_off_and_follows_the_rate",),
    ),
    Mutant(
        "nesterov-window-of-another-length",
        "baselines/ema_nesterov.py",
        '"ema_offset": 1 / (1 - group["decay"]),',
        '"ema_offset": 1 / group["decay"],',
        (f"{_BASELINES}::test_ema_nesterov_is_the_papers",),
    ),
    Mutant(
        "nesterov-push-not-by-decay",
        "baselines/ema_nesterov.py",
        '"pullback_strength": -push / group["decay"],',
        '"pullback_strength": -push,',
        (f"{_BASELINES}::test_ema_nesterov_is_the_papers",),
    ),
    Mutant(
        "nesterov-push-not-by-the-rate",
        "baselines/ema_nesterov.py",
        'push = group["push"] * float(group.get("lr", 1.0)) / group["largest_lr"] if on else 0.0',
        'push = group["push"] if on else 0.0',
        (f"{_BASELINES}::test_ema_nesterov_switches_off_and_follows_the_rate",),
    ),
    Mutant(
        "nesterov-returns-beyond",
        "baselines/ema_nesterov.py",
        "share = beyond / (1 + beyond)",
        "share = beyond",
        (f"{_BASELINES}::test_ema_nesterov_is_the_papers",),
    ),
    Mutant(
        "lookahead-alpha-of-the-other",
        "baselines/lookahead.py",
        "ema_offset=1 / alpha,",
        "ema_offset=max(1.0, 1 / (1 - alpha)) if alpha < 1 else 1.0,",
        (f"{_BASELINES}::test_lookahead_is_the_papers",),
    ),
    Mutant(
        "lookahead-half-way",
        "baselines/lookahead.py",
        'pullback_strength=float("inf"),',
        "pullback_strength=0.5,",
        (f"{_BASELINES}::test_lookahead_is_the_papers",),
    ),
    Mutant(
        "lookahead-every-step",
        "baselines/lookahead.py",
        "        update_every=int(k),\n",
        "",
        (f"{_BASELINES}::test_lookahead_is_the_papers",),
    ),
    Mutant(
        "schedule-free-average-between",
        "baselines/schedule_free.py",
        'torch.lerp(live, entries["z"].to(live), 1 - 1 / beta)',
        'torch.lerp(live, entries["z"].to(live), 1 - beta)',
        (f"{_BASELINES}::test_schedule_free_is_the_packages_own",),
    ),
    Mutant(
        "schedule-free-own-eval-misunderstood",
        "baselines/schedule_free.py",
        'if not group["train_mode"]:  # the package\'s own eval() was called: the parameter is x',
        "if False:",
        (f"{_WRAPPERS}::test_the_packages_own_eval_is_understood",),
    ),
    Mutant(
        "ademamix-slow-momentum-corrected",
        "baselines/ademamix.py",
        "alpha=alpha_at(t, alpha, alpha_warmup) * correction)",
        "alpha=alpha_at(t, alpha, alpha_warmup))",
        (f"{_ADEMAMIX}::test_the_papers_algorithm_over_200_steps",),
    ),
    Mutant(
        "ademamix-warm-up-one-late",
        "baselines/ademamix.py",
        "else alpha * t / warmup",
        "else alpha * (t - 1) / warmup",
        (
            f"{_ADEMAMIX}::test_alpha_grows_linearly_and_stays",
            f"{_ADEMAMIX}::test_the_papers_algorithm_over_200_steps",
        ),
    ),
]

MUTANTS = [
    *RULE,
    *FOREACH,
    *STATE,
    *PACE,
    *AVERAGING,
    *LOADING,
    *WEIGHTS,
    *WRAPPER,
    *PULLBACK,
    *AVERAGES,
    *BASELINES,
]
