"""The error tree: every class survives pickle and becomes an OpenAI error object."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest

from rkserve.api.common.output import UNEXPECTED, error_object
from rkserve.core import errors
from rkserve.core.errors import RkserveError
from tests.support.paths import PROJECT

API_DOC = PROJECT / "docs" / "reference" / "api.md"

SAMPLES: list[RkserveError] = [
    errors.RkserveError("It went wrong."),
    errors.RequestError("The key is wrong.", "stop[1]"),
    errors.UnsupportedParameter("No.", "logprobs"),
    errors.ModelNotFound("gpt-4o"),
    errors.AdapterNotFound("tone@v9"),
    errors.RouteNotFound("There is no such path."),
    errors.MethodNotAllowed("POST only."),
    errors.BodyTooLarge("The body is too long."),
    errors.BodyTooSlow("The body came too slowly."),
    errors.BoardTimeExceeded(3600.0),
    errors.UnsupportedMediaType("Send JSON."),
    errors.HostNotAllowed("evil.example"),
    errors.OriginNotAllowed("http://evil.example"),
    errors.OriginNotAllowed(None),
    errors.ContextOverflow(5000, 4096, "prompt"),
    errors.ContextOverflow(5000, 4096, "messages", at_least=True),
    errors.InputTooLong(5000, 4096, "input[3]"),
    errors.InputTooLong(5000, 4096, "input", at_least=True),
    errors.SamplingFixed("1.2.3", ("top_k", "temperature")),
    errors.AdapterBroken("pirate@2", "its file is damaged"),
    errors.CacheNotFound("policy"),
    errors.CacheUnsupported("There is no store."),
    errors.EmbeddingUnsupported("The model does not embed."),
    errors.CallAborted("board sim-0"),
    errors.GenerationNotFound("chatcmpl-1"),
    errors.BoardNotFound("sim-9"),
    errors.MemberNotFound("rock"),
    errors.StateConflict("resume", "ended", "It ended first."),
    errors.Forbidden("The key is wrong."),
    errors.InvalidApiKey("The key is wrong."),
    errors.ModelNotAllowed("team", "sim-chat"),
    errors.ControlPortOnly(),
    errors.HaproxyBypassed(),
    errors.TooManyWrongKeys(20, 3),
    errors.KeysUnknown(),
    errors.KeyNotFound("key_1"),
    errors.KeyExists("team"),
    errors.OperationNotFound("op-1"),
    errors.OperationConflict("A rollout is going on."),
    errors.JoinRefused("Ray is 2.59.0 on rock and 2.60.0 on the head."),
    errors.JoinDenied("The operator has denied rock."),
    errors.StaleEpoch("The cluster is at epoch 7."),
    errors.RebaseFailed("sim-0", "the trial generation ended with an error"),
    errors.StaleWeights("Step 7 is applied.", "version"),
    errors.AdapterExists("pirate@2 has another content."),
    errors.ArtifactRefused("The manifest names another base model."),
    errors.AdapterTrialFailed("tone@2", "rk-1", "crashed_on_load", "killed by SIGSEGV"),
    errors.SignatureRequired("There is no signed manifest.", "manifest"),
    errors.SignatureInvalid("None of the keys has signed it.", "manifest"),
    errors.ManifestInvalid("It is no envelope.", "manifest"),
    errors.ManifestMismatch("It is for another file.", "manifest"),
    errors.ManifestExpired("It expired 5 s ago.", "manifest"),
    errors.SignedVersionOlder("Version 6 is older than version 7.", "manifest"),
    errors.SignedVersionTaken("Version 7 is another content.", "manifest"),
    errors.ArtifactNotFound("There is no such file."),
    errors.PieceCorrupted("piece 2 of model.rkllm (from byte 4096)"),
    errors.EnginePaused("the cluster", 7),
    errors.ModelAsleep("sim-chat", "the disk of /srv is full"),
    errors.EngineAsleep("the cluster", 7),
    errors.VersionUnavailable("latest-only", "every board is behind"),
    errors.CoordinatorAway("It is starting."),
    errors.OperationTimeout("Not done within 5 s; undone."),
    errors.LedgerFailed("The ledger cannot be written: the disk is full."),
    errors.BoardGone("board-1", "its replica died"),
    errors.BoardBehind("board-1", "it obeys epoch 3"),
    errors.BoardAsleep("board-1", "its model is unloaded"),
    errors.BoardDrained("board-1", "it takes no requests until it is undrained"),
    errors.ResponsesFailed("The stored responses cannot be read."),
    errors.ResponseNotFound("resp_1"),
    errors.PreviousResponseNotFound("resp_1", "resp_2"),
    errors.ItemNotFound("msg_1"),
    errors.StageFailed("board-1", "no space left"),
    errors.HookFailed("redact", "it raised ValueError", "ValueError('42')"),
    errors.PauseExpired(600.0),
    errors.TooManyPaused("kitchen", 32),
    errors.IdempotencyKeyReused(),
    errors.AnswerNotKept(),
    errors.IdempotencyFailed("The disk is full."),
    errors.AnswerGivenUp(),
    errors.QueueFull(12, 7),
    errors.QueueTimeout(30.5, 5),
    errors.DeadlineUnreachable(20.0, 31.5, 12),
    errors.DeadlineUnreachable(0.5, 3.0),
    errors.DeadlineExceeded(20.0),
    errors.RateLimited("60 requests per minute", 3),
    errors.TooManyViewers(32),
    errors.NoBoard("sim-chat", "every board is loading", 9),
    errors.ModelDrained("sim-chat", "its boards are drained"),
    errors.ModelFetching("sim-chat", 500_000_000, 2_000_000_000, 17, "piece 2 was corrupted"),
    errors.DiskFull("sim-chat", "/opt/models", 1_000_000_000, 2_000_000_000, 64_000_000),
    errors.BoardFailed("board-1", "its node left"),
    errors.BoardOutOfOrder("sim-0", "quarantined"),
    errors.BoardSilent("board-1", "nothing within 60 s"),
    errors.UpstreamFailed("gpu", "it answers 502", again=True),
    errors.UpstreamRefused("gpu", "max_tokens is too large", "max_tokens"),
    errors.UpstreamUnable("gpu", "pause"),
    errors.EngineDied("board-1", "signal 11"),
    errors.EngineHung("board-1", "no callback for 30 s"),
    errors.RunFailed("board-1", "rkllm_run returned -1"),
    errors.PoisonRequest(2, "signal 11"),
    errors.ConfigError("boards: must be at least 1."),
    errors.BoardStartFailed("board-1", "the library\nis missing"),
    errors.NativeError("The library said no."),
    errors.LibraryMissing("librkllmrt.so: no such file."),
    errors.ReleaseRefused("Release 1.2.1b1 is a beta."),
    errors.LoadFailed("rkllm_init returned -1."),
    errors.CallFailed("rkllm_run", -1),
    errors.CallFailed("rkllm_load_lora", -1, "E rkllm: no such file"),
    errors.NothingComputed("logits", "it was aborted"),
    errors.FrameCorrupt("a frame claims 0 bytes"),
    errors.Misuse("run while RUNNING."),
    errors.StepsRefused("no token may follow"),
]


def tree(root: type[RkserveError]) -> Iterator[type[RkserveError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__.startswith(f"{errors.__name__}."):
            yield from tree(child)


def test_every_class_of_the_tree_has_a_sample() -> None:
    assert {type(error) for error in SAMPLES} == set(tree(RkserveError))


def test_the_drawing_in_the_docstring_names_every_class() -> None:
    drawn = set(re.findall(r"^[ |+-]*([A-Z]\w+)", errors.__doc__ or "", flags=re.MULTILINE))
    assert {cls.__name__ for cls in tree(RkserveError)} <= drawn


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickle(protocol: int) -> None:
    for error in SAMPLES:
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is type(error)
        assert back.args == error.args
        assert vars(back) == vars(error)
        assert back.message == str(back) == error.message


def test_an_error_becomes_the_openai_object() -> None:
    for error in SAMPLES:
        status, headers, body = error_object(error)
        assert body == {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }
        assert 400 <= status <= 599, error
        assert status == error.http_status
        assert headers == (
            {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        )


def test_a_message_is_a_sentence_with_the_facts_in_it() -> None:
    for error in SAMPLES:
        assert error.message.strip(), type(error)
        assert "object at 0x" not in error.message
        assert not error.message.startswith("(")  # the bare tuple of several arguments


@pytest.mark.parametrize(
    "exc",
    [
        pytest.param(ValueError("secret /home/me/key"), id="a ValueError"),
        pytest.param(KeyError("secret"), id="a KeyError"),
        pytest.param(RecursionError(), id="a RecursionError"),
        pytest.param(SystemExit(3), id="not even an Exception"),
    ],
)
def test_any_other_exception_becomes_a_500_that_tells_nothing(exc: BaseException) -> None:
    status, headers, body = error_object(exc)
    assert (status, headers) == (500, {})
    assert body["error"] == {
        "message": UNEXPECTED,
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


def test_every_error_code_is_documented() -> None:
    codes = {cls.code for cls in tree(errors.RkserveError) if cls.code} | {"internal_error"}
    page = API_DOC.read_text(encoding="utf-8")
    assert not [code for code in sorted(codes) if f"`{code}`" not in page]
