"""The closing table is computed from pyinfra's own JSON document."""

from gpuwright.deploy import count


def entry(**names):
    return {"success": [], "error": [], "hosts_with_change": [], "hosts_with_conditional_change": [], **names}


def test_a_run_counts_changes_and_one_failure_per_failed_host():
    results = {
        "operations": [entry(success=["a", "b"]), entry(success=["a"], error=["b"]), entry(error=["b"])],
        "failed_hosts": ["b"],
    }
    assert count({"plan": [], "results": results}, ["a", "b"]) == {
        "a": {"changed": 2, "failed": 0},
        "b": {"changed": 1, "failed": 1},
    }


def test_a_dry_run_counts_predicted_and_conditional_changes():
    plan = [entry(hosts_with_change=["a"]), entry(hosts_with_conditional_change=["a"])]
    assert count({"plan": plan, "results": None}, ["a", "b"]) == {
        "a": {"changed": 2, "failed": 0},
        "b": {"changed": 0, "failed": 0},
    }
