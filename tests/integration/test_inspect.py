"""`dora inspect` over a real Kafka: lists, one trajectory, one group, and bad input."""

import json

import pytest
from click.testing import Result

from dora.bus import ClusterSettings, TopicAdmin, topic_plan
from dora.cli.inspect.inspect import show_trajectory
from dora.config import KafkaSection
from tests.brokers import Cluster
from tests.small_run import dora, refused
from tests.written_run import (
    EVALUATED,
    OUTSTANDING,
    PROMPT,
    SET_ASIDE,
    TAKEN_OVER,
    UNFINISHED,
    WrittenRun,
    config_of,
    logprobs_of,
    response,
    spoil,
    write,
)


def look(written: WrittenRun, *options: str) -> Result:
    return dora("inspect", written.run, "-b", written.settings.bootstrap_servers, *options)


def asked(written: WrittenRun, *options: str) -> dict:  # type: ignore[type-arg]
    result = look(written, *options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def ids(written: WrittenRun, *options: str) -> list[str]:
    return [row["id"] for row in asked(written, *options)["trajectories"]]


def spelled(tokens: list[int]) -> str:
    """What the tokenizer of small runs makes of token ids."""
    return "".join("abcdefghijklmnopqrstuvwxyz"[token - 2] for token in tokens)


def test_the_list_says_what_became_of_each_trajectory(written: WrittenRun) -> None:
    shown = asked(written, "--limit", "0")
    rows = {row["id"]: row for row in shown["trajectories"]}
    assert shown["matching"] == len(rows) == 17 and shown["unfinished"] == 2
    first = rows["g3/1"]
    assert first["state"] == "trained" and first["step"] == 3 and first["staleness"] == 1
    assert first["reward"] == 1.03 and first["length"] == len(response(3, 1))
    assert first["logprob"] == pytest.approx(sum(logprobs_of(response(3, 1))) / first["length"])
    assert rows["g0/0"]["staleness"] == 0
    assert rows[f"{SET_ASIDE}/0"]["reason"] == "verifier timed out"
    assert rows[f"{OUTSTANDING}/0"]["state"] == "outstanding"
    assert rows[f"{EVALUATED}/0"]["state"] == "evaluation"
    assert rows[TAKEN_OVER]["attempts"] == 2 and rows[TAKEN_OVER]["worker"] == "w1"
    people = look(written, "--limit", "5")
    assert "5 of 17 trajectories; 12 more: --limit 0 shows all" in people.output
    assert "2 trajectories that were started are not in the log as finished" in people.output
    assert "text of g0/0" in people.output
    every = look(written, "--limit", "0").output
    assert "set aside: verifier timed out" in every and "step 3" in every


def test_lists_are_narrowed_by_version_step_and_conditions(written: WrittenRun) -> None:
    assert ids(written, "--version", "3") == [f"{OUTSTANDING}/0", f"{OUTSTANDING}/1"]
    third = [f"{group}/{sample}" for group in ("g3", "g4", "g5", SET_ASIDE) for sample in (0, 1)]
    assert ids(written, "--step", "3") == third
    assert ids(written, "--step", "3", "--version", "1") == ["g3/0", "g3/1"]
    assert ids(written, "--step", "1", "--version", "2") == []
    assert ids(written, "--filter", "reward>=1.03", "--filter", "state=trained") == [
        "g3/1",
        "g4/1",
        "g5/1",
    ]
    assert ids(written, "--filter", "text~g[01]/1$") == ["g0/1", "g1/1"]
    assert ids(written, "--filter", "purpose=eval") == [f"{EVALUATED}/0"]
    assert ids(written, "--filter", "reward=none") == [f"{SET_ASIDE}/1"]


def test_lists_are_sorted_and_what_has_no_value_comes_last(written: WrittenRun) -> None:
    rising = asked(written, "--sort", "reward", "--limit", "0")["trajectories"]
    rewards = [row["reward"] for row in rising]
    assert rewards[-1] is None and rewards[:-1] == sorted(rewards[:-1])
    falling = asked(written, "--sort", "length", "--reverse", "--limit", "0")["trajectories"]
    lengths = [row["length"] for row in falling]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
    stale = asked(written, "--sort", "staleness", "--reverse", "--limit", "2")["trajectories"]
    assert [row["id"] for row in stale] == ["g3/0", "g3/1"]


def test_groups_are_listed_with_means_over_their_trajectories(written: WrittenRun) -> None:
    shown = asked(written, "--groups", "--limit", "0")
    rows = {row["id"]: row for row in shown["groups"]}
    assert shown["matching"] == len(rows) == 9
    assert rows["g2"]["reward"] == pytest.approx(0.52) and rows["g2"]["reward_max"] == 1.02
    assert rows["g2"]["length"] == (len(response(2, 0)) + len(response(2, 1))) / 2
    assert rows["g2"]["finish"] == "1 length, 1 stop" and rows["g2"]["size"] == 2
    assert rows[SET_ASIDE]["state"] == "set-aside"
    found = asked(written, "--groups", "--filter", "reward=none")["groups"]
    assert [row["id"] for row in found] == [SET_ASIDE] and found[0]["finished"] == 2
    people = look(written, "--groups", "--sort", "reward", "--limit", "1")
    assert "1 of 9 groups; 8 more" in people.output


def test_a_trajectory_is_told_chunk_by_chunk_with_its_attempts(written: WrittenRun) -> None:
    shown = asked(written, "--trajectory", TAKEN_OVER)
    tokens = response(1, 0)
    assert [token["id"] for token in shown["tokens"]] == [*PROMPT, *tokens]
    assert shown["prompt_text"] == spelled(list(PROMPT))
    assert shown["response_text"] == spelled(tokens)
    assert [t["logprob"] for t in shown["tokens"][3:]] == logprobs_of(tokens)
    first, second = shown["attempts"]
    assert (first["worker"], first["end"], first["counts"]) == (
        "w0",
        "taken over by attempt 1",
        False,
    )
    assert second["worker"] == "w1" and second["resumed_tokens"] == 4 and second["counts"]
    assert [(c["attempt"], c["sequence"], c["text"]) for c in shown["chunks"]] == [
        (0, 0, spelled(tokens[:4])),
        (1, 0, spelled(tokens[:4])),
        (1, 1, spelled(tokens[4:])),
    ]
    assert [c["at_ms"] for c in shown["chunks"]] == [110, 210, 310]
    assert [c["prefix_tokens"] for c in shown["commands"]] == [0, 4]
    assert shown["reward"] == 0.01 and shown["reward_parts"] == {"right": 0.0, "style": 0.01}
    assert shown["advantage"] == pytest.approx(-1.0, abs=1e-5), "of two, divided by the deviation"
    assert (shown["state"], shown["step"], shown["staleness"]) == ("trained", 1, 0)
    people = look(written, "--trajectory", TAKEN_OVER, "--logprobs").output
    for part in (
        f"trajectory {TAKEN_OVER} of run {written.run}",
        "step 1 (staleness 0)",
        "0.01 (right 0, style 0.01)",
        "taken over by attempt 1",
        "+4 (4 resumed)",
        spelled(tokens),
        "-1.2500",
        "temperature 1, top_p 1, top_k 0",
    ):
        assert part in people, f"{part!r} is not in\n{people}"
    assert "\x1b" not in people, "no colour where there is no terminal"


def test_another_command_may_show_a_trajectory(
    written: WrittenRun, capsys: pytest.CaptureFixture[str]
) -> None:
    kafka = KafkaSection(bootstrap_servers=written.settings.bootstrap_servers)
    show_trajectory(written.run, "g0/1", kafka, as_json=True)
    assert json.loads(capsys.readouterr().out)["id"] == "g0/1"


def test_a_group_is_shown_with_what_each_response_earned(written: WrittenRun) -> None:
    shown = asked(written, "--group", "g4")
    assert [view["id"] for view in shown["trajectories"]] == ["g4/0", "g4/1"]
    assert [view["advantage"] for view in shown["trajectories"]] == pytest.approx(
        [-1.0, 1.0], abs=1e-5
    )
    people = look(written, "--group", "g4").output
    assert people.count(spelled(list(PROMPT))) >= 1 and "prompt, 3 tokens" in people
    assert people.count("prompt, 3 tokens") == 1
    assert spelled(response(4, 0)) in people and spelled(response(4, 1)) in people
    assert "mean 0.54, 0.04 to 1.04" in people


def test_what_is_set_aside_or_unfinished_says_so(written: WrittenRun) -> None:
    aside = look(written, "--trajectory", f"{SET_ASIDE}/1")
    assert "set aside: verifier timed out" in aside.output
    assert "no advantage: a trajectory of the group has no reward" in aside.stderr
    unfinished = asked(written, "--trajectory", f"{UNFINISHED}/0")
    assert unfinished["finished"] is False and unfinished["state"] == "outstanding"
    assert unfinished["response_text"] == spelled(response(8, 0)[:4])
    assert unfinished["attempts"][0]["end"] == "no end in the log"
    assert "not finished yet" in unfinished["notes"][0]
    people = look(written, "--trajectory", f"{UNFINISHED}/0").output
    assert "(not in the log)" in people and "not finished yet" in people
    evaluated = asked(written, "--trajectory", f"{EVALUATED}/0")
    assert evaluated["state"] == "evaluation" and evaluated["advantage"] is None


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        (("--trajectory", "g99/0"), 1, ("no trajectory g99/0", "nearest ones: g4/0, g5/0")),
        (("--trajectory", "g4/9"), 1, ("no trajectory g4/9", "g4/0, g4/1")),
        (("--trajectory", "g4"), 1, ("no trajectory id", "g4/0, g4/1")),
        (("--group", "g99"), 1, ("no group g99", "nearest ones: g4, g5")),
        (("--version", "9"), 1, ("no version 9", "versions 0 to 3")),
        (("--step", "9"), 1, ("no step 9", "steps 1 to 3")),
        (("--filter", "rewards<1"), 2, ("no field rewards", "reward, length", "finish, worker")),
        (("--filter", "reward<much"), 2, ("'much' is no number",)),
        (("--filter", "__import__('os')"), 2, ("not of the form FIELD SIGN VALUE",)),
        (("--filter", "text~("), 2, ("no regular expression",)),
        (("--sort", "mismatch"), 2, ("has to be computed", "--recompute")),
        (("--filter", "mismatch>0.1"), 2, ("has to be computed", "--recompute")),
        (("--trajectory", "g4/0", "--sort", "reward"), 2, ("--sort is for lists",)),
        (("--trajectory", "g4/0", "--group", "g4"), 2, ("cannot be combined",)),
        (("--logprobs",), 2, ("--logprobs is for --trajectory and --group",)),
    ],
)
def test_what_makes_no_sense_is_refused(
    written: WrittenRun, options: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    refused(look(written, *options), code, *parts)


def test_a_run_that_has_not_begun_is_refused(settings: ClusterSettings, run_name: str) -> None:
    with TopicAdmin(settings) as admin:
        admin.create(topic_plan(config_of(run_name, settings.bootstrap_servers, "model")))
    refused(dora("inspect", run_name, "-b", settings.bootstrap_servers), 1, "has not begun")


def test_without_its_tokenizer_a_trajectory_is_shown_as_ids_and_recorded_text(
    kafka: Cluster,
) -> None:
    """And foreign and deleted records are told, and do not keep the rest from being shown."""
    written = write(kafka, "./no-such-model")
    spoil(written)
    result = look(written, "--trajectory", TAKEN_OVER)
    assert result.exit_code == 0, result.output
    assert " ".join(map(str, response(1, 0))) in result.stdout
    assert f"text of {TAKEN_OVER}" in result.stdout
    assert "without the policy's tokenizer" in result.stderr
    assert "foreign record: " in result.stderr and "a DeadLetter" in result.stderr
    listed = look(written, "--limit", "0")
    assert listed.exit_code == 0 and "17 of 17 trajectories" in listed.stdout
    assert "foreign record: " in listed.stderr
    assert len(asked(written)["unreadable"]) == 3
    refused(look(written, "--trajectory", TAKEN_OVER, "--recompute"), 1, "version 0 are gone")

    written.delete(written.topics.trajectories, 0, 4)
    left = asked(written, "--trajectory", TAKEN_OVER)
    assert (
        left["finished"] is False
        and "has no finished record in the log any more" in (left["notes"][0])
    )
    assert left["missing"] == [
        f"{written.topics.trajectories} partition 0 begins at offset 4: 0 to 3 were deleted by "
        "retention"
    ]
    written.delete(written.topics.chunks, 0, 9)
    refused(
        look(written, "--trajectory", TAKEN_OVER),
        1,
        "nor a chunk",
        "0 to 3 were deleted by retention",
    )
