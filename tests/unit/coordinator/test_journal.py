"""Keys of the turn journal: equal requests are told apart by their count, everything else by the hash."""

from aether_common.arrays import pack_tokens
from aether_common.wire import Sampling
from aether_coordinator.journal import Claims, TurnKey, request_digest

SAMPLING = Sampling(max_tokens=8)


def test_the_k_th_equal_request_claims_the_k_th_answer():
    claims = Claims("e", 0)
    assert [claims.claim("d").count for _ in range(3)] == [0, 1, 2]
    assert claims.claim("other").count == 0


def test_a_released_claim_is_taken_again():
    claims = Claims("e", 0)
    first, second = claims.claim("d"), claims.claim("d")
    claims.release(first)
    assert claims.claim("d") == first
    claims.release(second)
    assert claims.claim("d") == second


def test_what_the_digest_depends_on():
    digests = {
        request_digest(pack_tokens([1, 2]), SAMPLING, "policy"),
        request_digest(pack_tokens([1, 3]), SAMPLING, "policy"),
        request_digest(pack_tokens([1, 2]), Sampling(max_tokens=9), "policy"),
        request_digest(pack_tokens([1, 2]), Sampling(max_tokens=8, temperature=0.5), "policy"),
        request_digest(pack_tokens([1, 2]), SAMPLING, "user"),
    }
    assert len(digests) == 5
    assert request_digest(pack_tokens([1, 2]), Sampling(max_tokens=8, temperature=1.0, top_p=1.0), "policy") in digests


def test_job_ids_and_seeds_are_functions_of_run_and_key():
    key = TurnKey("e", 0, "d" * 64, 0)
    others = [
        TurnKey("e", 1, "d" * 64, 0),
        TurnKey("e", 0, "d" * 64, 1),
        TurnKey("f", 0, "d" * 64, 0),
    ]
    jobs = {key.job("run", 0), key.job("run", 1), key.job("ran", 0), *(other.job("run", 0) for other in others)}
    assert len(jobs) == 6
    assert key.job("run", 0) == TurnKey("e", 0, "d" * 64, 0).job("run", 0)
    assert 0 <= key.job_seed("run", 0) < 2**63
    assert len(key.job("run", 0)) == 32
