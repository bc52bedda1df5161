# Every target that has a comment behind two hashes is listed by `make help`.

GO   ?= go
LINT  = $(GO) tool -modfile=tools/go.mod

# What tests use beside PostgreSQL: poolers to run behind, a clock to set, a terminal, a browser, extensions, other tools of migrations and
# earlier versions of Lockers.
# Where Debian's packages cannot be had these are the installed ones, if any.
BESIDE = export PGXLOCK_TEST_PGBOUNCER="$${PGXLOCK_TEST_PGBOUNCER-$$(scripts/pgbouncer-tree)}" \
	PGXLOCK_TEST_FAKETIME="$${PGXLOCK_TEST_FAKETIME-$$(scripts/faketime-tree)}" \
	PGXLOCK_TEST_PGPOOL="$${PGXLOCK_TEST_PGPOOL-$$(scripts/pgpool-tree)}" \
	PGXLOCK_TEST_TMUX="$${PGXLOCK_TEST_TMUX-$$(scripts/tmux-tree)}" \
	PGXLOCK_TEST_PROMTOOL="$${PGXLOCK_TEST_PROMTOOL-$$(scripts/promtool-tree)}" \
	PGXLOCK_TEST_CHROMIUM="$${PGXLOCK_TEST_CHROMIUM-$$(scripts/chromium-tree)}" \
	PGXLOCK_TEST_PLPGSQL_CHECK="$${PGXLOCK_TEST_PLPGSQL_CHECK-$$(scripts/plpgsql-check-tree)}" \
	PGXLOCK_TEST_GOLANGMIGRATE="$(CURDIR)/bin/migrators" \
	PGXLOCK_TEST_PROTOCOLS="$(CURDIR)/bin/protocols";

# The command that the browser's tests serve with, built before them.
export PGXLOCK_TEST_COMMAND ?= $(CURDIR)/bin/pgxlock

# A program with the race detector sleeps for a second before it ends, and the tests start hundreds of them.
export GORACE ?= atexit_sleep_ms=10

RACE =

# make soak runs this part of its rounds: 1 is all of them.
SOAK ?= 1

# Modules of their own, for what a program that only locks must not depend on. Users and each commit need the first ones.
CORE   = . cmd/pgxlock adapters/prometheus
NESTED = cmd/pgxlock adapters/prometheus adapters/golangmigrate adapters/gocron adapters/otel internal/containers \
	examples/stacks migrations/othertools cmd/pgxlock/browsertest bench chaos tools
MODULES = . $(NESTED)

# What make test may use of servers: see "What tests may cost" in CONTRIBUTING.md.
MOST = servers=9,connections=2500,databases=165

.DEFAULT_GOAL := help
.PHONY: help demo test test-all testrun test-tools test-integration test-versions soak chaos bench bench-quick bench-growth model seed-defects image pictures lint build with clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: with ## show locks at work, on a throw-away PostgreSQL
	@$(GO) build -o bin/ ./examples/demo
	@bin/with --throw-away -- bin/demo

test: build testrun ## run what each commit needs, on a real PostgreSQL; all tests of one package with PKG=./migrations
ifdef PKG
	@$(MAKE) --no-print-directory test-tools
	@$(BESIDE) bin/with -- $(GO) test $(if $(filter $(PKG:./%=%),$(NESTED)),-C $(PKG)) -count=1 -shuffle=on -vet=off -timeout 80m $(RACE) $(if $(filter $(PKG:./%=%),$(NESTED)),./...,$(PKG))
else
	@bin/testrun -build $(RACE) bin/tests $(CORE)
	@bin/with --most $(MOST) -- bin/testrun bin/tests -test.short
endif

test-all: build testrun test-tools ## run all tests, on each version of PostgreSQL that can be had; with the race detector by RACE=-race
	@scripts/test-versions --others
	@bin/testrun -build $(RACE) bin/tests-all $(MODULES)
	@$(BESIDE) bin/with -- bin/testrun bin/tests-all
	@scripts/fuzz bin/tests-all 20000x
	@scripts/model --short

testrun: # builds all test programs before it runs them
	@$(GO) build -o bin/ ./internal/testrun

test-tools: # golang-migrate's command, and a program that calls its library, for the tests of migrations; Lockers of earlier protocols
	@scripts/protocols
	@$(GO) build -C adapters/golangmigrate -tags pgx5 -o ../../bin/migrators/ ./internal/golangmigrate github.com/golang-migrate/migrate/v4/cmd/migrate

test-integration: build testrun ## run the main job in a container, through testcontainers-go
	@$(GO) build -C internal/containers -o ../../bin/with-containers ./with
	@bin/testrun -build -only '^github.com/pgxlock/pgxlock$$' bin/tests-integration .
	@bin/with-containers --container -- bin/testrun bin/tests-integration -test.v -test.run '^TestIntegration$$'

test-versions: build testrun ## run what depends on the server on PostgreSQL 15, 17 and 18, from Debian's packages
	@scripts/test-versions $(VERSIONS)

soak: build testrun test-tools ## run the long tests: many rounds under faults (about 25 minutes); a part of the rounds with SOAK=0.3
	@bin/testrun -build -race bin/tests-soak $(CORE)
	@$(BESIDE) PGXLOCK_SOAK='$(SOAK)' bin/with -- bin/testrun bin/tests-soak -test.run '^TestSoak'

chaos: ## try to break all kinds of locks, and judge their histories (10 minutes); see CHAOS=-help, as CHAOS='-for 30m -seed 7'
	@$(GO) build -C chaos -o ../bin/ .
	@PGXLOCK_TEST_PGBOUNCER="$${PGXLOCK_TEST_PGBOUNCER-$$(scripts/pgbouncer-tree)}" \
	PGXLOCK_TEST_FAKETIME="$${PGXLOCK_TEST_FAKETIME-$$(scripts/faketime-tree)}" \
	bin/chaos $(CHAOS)

model: ## check the models of the protocol in docs/model with spin (about 2 minutes)
	@scripts/model

bench: ## measure what locks cost, as ratios in one run, and write docs/figures.md (about 8 minutes; on a busy machine up to 5 times)
	@$(GO) run -C bench . -runs 5 -write ../docs

bench-quick: ## measure the same against floor, copied SQL and Redis only (under a minute)
	@$(GO) run -C bench . -time 750ms -run '^(advisory|lease)/(floor|seed|redislock|rueidis) (1|32|256)$$'

bench-growth: ## measure how costs grow with callers, processes, rows and waiters, and write docs/sizing.md (about 5 minutes)
	@$(GO) run -C bench . -growth -write ../docs

seed-defects: build ## show what the widespread acquire_lock() gets wrong, beside pgxlock's
	@PGXLOCK_SEED_DEFECTS=table bin/with -- $(GO) test -C internal/sqltest -count=1 -run '^TestSeedDefects$$'

image: ## make a PostgreSQL 15 image from Debian's packages, for an engine without a registry
	scripts/image 15

pictures: build ## draw what commands show in a terminal into docs/pictures, from real runs
	@$(GO) build -o bin/ ./examples/demo
	@PGXLOCK_TEST_TMUX="$${PGXLOCK_TEST_TMUX-$$(scripts/tmux-tree)}" bin/with --throw-away -- $(GO) run -C tools ./pictures ..

lint: build ## golangci-lint (with gofmt and go vet), actionlint, shellcheck, what holds the documents, and what is built and released
	@for m in $(MODULES); do echo "$$m:"; (cd $$m && $(GO) tool -modfile=$(CURDIR)/tools/go.mod golangci-lint run ./...) || exit 1; done
	@PGXLOCK_TEST_BUILDS=1 bin/with -- scripts/test-builds
	$(LINT) actionlint .github/workflows/*.yml
	@if command -v shellcheck >/dev/null; then shellcheck -x scripts/* .ci/run; \
	else echo "shellcheck is not installed: scripts not checked"; fi

build: with ## build bin/pgxlock, the command
	@$(GO) list -C cmd/pgxlock -deps . >/dev/null 2>&1 || true
	@$(GO) build -C cmd/pgxlock -o ../../bin/ .

with: # chooses and starts the server of the tests and of the demo
	@test -x bin/with || echo "Building pgxlock; the first time this fetches Go modules ..."
	@$(GO) list -deps ./examples/demo >/dev/null 2>&1 || true # fetches without a line for each; the build names what is missing
	@if scripts/have-image; then $(GO) build -C internal/containers -o ../../bin/with ./with; else $(GO) build -o bin/ ./internal/pgserver/with; fi

clean: ## remove what was built
	rm -rf bin
