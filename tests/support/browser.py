"""What tests of pages in a real browser share."""

from axe_playwright_python.sync_playwright import Axe

SERIOUS = ("serious", "critical")


def assert_accessible(page):
    """Fail if axe-core finds a serious violation on the page as it is shown now."""
    violations = Axe().run(page).response["violations"]
    serious = [
        f"{found['id']}: {found['help']} at {[node['html'][:200] for node in found['nodes'][:3]]}"
        for found in violations
        if found["impact"] in SERIOUS
    ]
    assert serious == [], "\n".join(serious)


def wait_until(page, condition):
    """Ask from outside: the page's policy allows no script that is given as text."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)
